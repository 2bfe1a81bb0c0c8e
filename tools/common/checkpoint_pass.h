// What commands that read a whole checkpoint have in common: the progress bar, and the checkpoint that is
// read instead where a run removes the one that was chosen.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "train/run/run_path.h"

namespace tessera::tools {

using OnProgress = std::function<void(int64_t done, int64_t total)>;

/// Calls `pass` with the tag of the path's checkpoint, and with what shows its bytes in a bar named
/// `description`; anew with the next checkpoint if this one is removed meanwhile. Throws what `pass` throws,
/// and CheckpointError.
void pass_over_checkpoint(
    const std::string& description, const train::RunPath& path,
    const std::function<void(const std::string& tag, const OnProgress& progress)>& pass);

}  // namespace tessera::tools
