// Writes one rank's file of a checkpoint: the rank's slice of every unit, and this rank's own data.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/image_file.h"
#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/names.h"
#include "checkpoint/manifest/saved_layout.h"
#include "core/dtype.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// This rank's slice of one unit, (shard_numel) each. The memory is the caller's.
struct UnitData {
  SourceBytes weights;              ///< fp32 master of a trainable unit; compute dtype of a frozen one
  std::vector<SourceBytes> states;  ///< fp32, in the order of the state names; none for a frozen unit
};

/// A tensor that is not sharded: contiguous, row-major. The memory is the caller's.
struct WholeTensor {
  std::string name;
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

/// Bytes of this rank only, such as the state of its random number generator. The memory is the caller's.
struct Blob {
  std::string name;
  std::span<const std::byte> data;
};

struct ShardContent {
  std::string tag;
  int rank = 0;
  const SavedLayout* layout = nullptr;
  std::vector<std::string> state_names;
  std::vector<UnitData> units;  ///< by unit
  std::vector<WholeTensor> tensors;
  std::vector<Blob> blobs;
};

/// Throws CheckpointError naming a name, shape or span that does not fit the layout. Called before any
/// file is created.
void check_content(const ShardContent& content);
/// Writes and hashes `path` in one pass over the memory, and syncs it if `disk` does. Throws
/// DiskError, and CheckpointError as check_content() does.
FileRecord write_shard_file(const Disk& disk, const std::filesystem::path& path, const ShardContent& content);

}  // namespace tessera::checkpoint
