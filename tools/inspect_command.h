// `tessera inspect DIR`: what a checkpoint holds, and whether it is whole.
// Starts no ranks and needs no libtorch.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::tools {

/// Adds the command to `app`; parsing it prints to stdout and stores the exit code: 0, or 1 for a
/// damaged checkpoint. What cannot be opened at all comes out of the parse as a CheckpointError.
void add_inspect_command(CLI::App& app, int& exit_code);

}  // namespace tessera::tools
