// `tessera train CONFIG`: reads the configuration, then either starts ranks of itself or is one.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// Adds `train` to `app`. Parsing it trains and stores the exit code in `exit_code`,
/// which must outlive the parse; errors come out of the parse as tessera::Error. `args` is
/// argv[1] and on, for the ranks it starts.
void add_train_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code);

}  // namespace tessera::tools
