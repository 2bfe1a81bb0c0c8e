// `.metadata` of a folder of torch.distributed.checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

/// Where a chunk or a value lies.
struct DistributedPlace {
  std::string file;  ///< within the folder
  int64_t offset = 0;
  int64_t bytes = 0;
  std::string transform;  ///< of a stream that was changed on its way into the file
};

/// A box of a tensor.
struct DistributedChunk {
  std::vector<int64_t> begin;
  std::vector<int64_t> sizes;
  DistributedPlace place;
};

struct DistributedItem {
  std::string name;
  std::vector<std::string> key;  ///< of the value in the state dict that was saved: keys of dicts in dicts
  std::vector<bool> is_index;    ///< by part of the key: the place in a list; shorter: false
  bool is_tensor = false;
  std::optional<DType> type;
  std::vector<int64_t> shape;
  std::vector<DistributedChunk> chunks;  ///< within the shape, none of them empty
  DistributedPlace place;                ///< of a value that is no tensor
};

struct DistributedMetadata {
  std::vector<DistributedItem> items;
  bool in_order = false;  ///< the items are in the order of the state dict
  std::string version;    ///< of the format
};

/// Throws CheckpointError naming the file and what was found.
DistributedMetadata read_distributed_metadata(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
