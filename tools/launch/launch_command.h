// `tessera launch`, and how other commands start ranks of themselves.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "core/log.h"
#include "tools/launch/launch_flags.h"
#include "tools/launch/launch_plan.h"

namespace tessera::tools {

/// Cuts `tessera launch [flags] -- PROGRAM [ARGS...]` at the first `--` and returns
/// what follows; nothing for another command. To be called before the parse: CLI11 would
/// drop empty arguments and split "[a,b]".
std::vector<std::string> take_program(int& argc, char** argv);

/// Adds `launch [flags]` to `app`. Parsing it runs the ranks of `program` (from
/// take_program) and stores the exit code in `exit_code`, which must outlive the parse; what
/// launcher::run throws comes out of the parse.
void add_launch_command(CLI::App& app, const std::vector<std::string>& program, const Logger& log,
                        int& exit_code);

/// Is for a command such as `tessera train CONFIG --nproc N`, where starts_ranks() says so. Starts ranks of
/// this very program by the plan, with `args` as argv[1] and on, and returns the exit code. Throws as
/// run_plan.
int run_ranks_of_self(const LaunchPlan& plan, const std::vector<std::string>& args, const Logger& log);
/// The same on this host alone, as many ranks as the flags say.
int run_ranks_of_self(const LaunchFlags& flags, const std::vector<std::string>& args, const Logger& log);

}  // namespace tessera::tools
