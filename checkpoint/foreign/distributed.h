// A folder of torch.distributed.checkpoint (DCP), for the readers of the programs that write such folders.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "checkpoint/foreign/saved_state.h"

namespace tessera::checkpoint {

struct DistributedContents {
  std::vector<SavedTensor> model;  ///< in the model's order where the folder has it
  bool in_order = false;
  std::optional<SavedOptimizer> optimizer;
  nlohmann::json extras = nlohmann::json::object();  ///< what is neither
  std::vector<std::string>
      beside_model;  ///< keys of the dict in `extras` that was the model's; empty: the first
};

/// Whether the folder has DCP's files, as far as names say.
bool is_distributed(const std::filesystem::path& folder);

/// Reads the folder's metadata and the heads of its tensors; adds its files, and lines to not_read, to
/// `checkpoint`. Throws CheckpointError for a folder that is incomplete or damaged.
DistributedContents read_distributed_contents(ForeignCheckpoint& checkpoint,
                                              const std::filesystem::path& folder);

/// Moves what has a place in ForeignCheckpoint there: the scheduler, the counts of updates, the loss scaler.
/// The rest becomes client_state. `beside_model`: keys of a dict that is looked at first.
void take_extras(ForeignCheckpoint& checkpoint, nlohmann::json extras,
                 const std::vector<std::string>& beside_model = {});

}  // namespace tessera::checkpoint
