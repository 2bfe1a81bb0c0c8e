// `tessera consolidate DIR OUT`, also called zero_to_fp32 (DeepSpeed's name): a
// sharded checkpoint as one model.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::tools {

/// Adds `consolidate` to `app`. Parsing it does the work; errors come
/// out of the parse as tessera::Error.
void add_consolidate_command(CLI::App& app);

}  // namespace tessera::tools
