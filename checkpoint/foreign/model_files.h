// Files of weights in a folder, for the readers of models and of what trainers write around them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/foreign/saved_state.h"

namespace tessera::checkpoint {

struct ModelFiles {
  std::vector<SavedTensor> entries;
  bool in_order = false;  ///< the entries are in the model's order
};

/// The file of weights, or index, that Hugging Face's programs would read from a folder. Empty: there is
/// none.
std::filesystem::path weights_in(const std::filesystem::path& folder);

/// Reads the heads of a .safetensors file, an index of several files, or a state dict of torch.save. Throws
/// CheckpointError naming a file that is missing or damaged.
ModelFiles read_model_files(ForeignCheckpoint& checkpoint, const std::filesystem::path& path);

}  // namespace tessera::checkpoint
