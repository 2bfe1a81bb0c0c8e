// `tessera memory`: what every ZeRO stage costs, measured beside the formula, or estimated.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// Adds `memory [CONFIG]` to `app`. Parsing it runs the trials and prints; `args` is argv[1] and on.
/// `exit_code` must outlive the parse; ConfigError, DataError and CommError come out of it.
void add_memory_command(CLI::App& app, const std::vector<std::string>& args, int& exit_code);

}  // namespace tessera::tools
