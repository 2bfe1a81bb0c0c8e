// `tessera eval RUN`: evaluates a trained model once more, on any number of ranks.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// Adds `eval` to `app`. Parsing it evaluates and stores the exit code in `exit_code`,
/// which must outlive the parse; errors come out of the parse as tessera::Error. `args` is
/// argv[1] and on, for the ranks it starts.
void add_eval_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code);

}  // namespace tessera::tools
