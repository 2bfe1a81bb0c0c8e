// `tessera launch`, and the flags by which other commands start ranks of themselves.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"

namespace tessera::tools {

/// The flags of every command that starts ranks.
struct LaunchFlags {
  std::optional<int> nproc;  ///< -n, --nproc (torchrun's --nproc-per-node, too)
  int master_port = 0;       ///< --master-port; 0: a free one
  std::string log_dir;  ///< --log-dir; empty: a temporary folder, kept if it says more about a failure than
                        ///< was printed
  double save_grace_s = 30;  ///< --save-grace
};

/// Local. Adds the flags to `command`. `flags` must outlive the parse. --rendezvous-timeout becomes
/// TESSERA_RENDEZVOUS_TIMEOUT_S in this process's environment, which ranks inherit.
void add_launch_flags(CLI::App& command, LaunchFlags& flags);

/// Local. Cuts `tessera launch [flags] -- PROGRAM [ARGS...]` at the first `--` and returns
/// what follows; nothing for another command. To be called before the parse: CLI11 would
/// drop empty arguments and split "[a,b]".
std::vector<std::string> take_program(int& argc, char** argv);

/// Local. Adds `launch [flags]` to `app`. Parsing it runs the ranks of `program` (from
/// take_program) and stores the exit code in `exit_code`, which must outlive the parse; what
/// launcher::run throws comes out of the parse.
void add_launch_command(CLI::App& app, const std::vector<std::string>& program, const Logger& log,
                        int& exit_code);

/// Local. For a command such as `tessera train CONFIG --nproc N`, where launcher::should_start_ranks
/// says so: starts N ranks of this very program (unset: one), with `args` as argv[1] and on, and returns
/// the exit code. Throws as launcher::run.
int run_ranks_of_self(const LaunchFlags& flags, const std::vector<std::string>& args, const Logger& log);

}  // namespace tessera::tools
