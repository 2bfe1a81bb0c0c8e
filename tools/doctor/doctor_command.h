// `tessera doctor`: looks at the hosts of a run and at the network between them.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::tools {

/// Adds `doctor [flags]` to `app`. Parsing it prints the report and stores 1 in `exit_code`, which
/// must outlive the parse, if there is a problem.
void add_doctor_command(CLI::App& app, int& exit_code);

}  // namespace tessera::tools
