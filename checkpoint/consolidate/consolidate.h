// consolidate(): turns a sharded checkpoint into one full model that other
// programs read (DeepSpeed: zero_to_fp32.py).
//
// The model passes through a few buffers of fixed size: one thread reads and verifies, the caller's thread
// converts and writes. The reads of a buffer are sorted by file and position, so that a block with parts of
// many small parameters is read and hashed once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/formats/model_writer.h"
#include "core/dtype.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

struct ConsolidateOptions {
  std::filesystem::path directory;  ///< of checkpoints
  std::string tag;                  ///< empty: the one `latest` names
  std::filesystem::path output;     ///< a file; with max_shard_bytes a folder
  ModelFormat format = ModelFormat::kSafetensors;
  /// fp32, bf16 or fp16: the type of all floating-point tensors written. Trainable parameters come from their
  /// fp32 masters; integers and booleans are unchanged.
  DType dtype = DType::kFloat32;
  int64_t max_shard_bytes = 0;  ///< see ModelWriterOptions
  DiskOptions disk;
  std::function<void(int64_t done, int64_t total)> progress;  ///< called with the bytes written and the total
};

struct ConsolidateResult {
  std::filesystem::path checkpoint;        ///< DIR/TAG
  int64_t num_tensors = 0;                 ///< a tied tensor counts once
  int64_t num_names = 0;                   ///< all names, also those of tied tensors
  int64_t numel = 0;                       ///< elements of all tensors; a tied tensor counts once
  int64_t bytes = 0;                       ///< of these elements, as written
  int64_t num_overflowed = 0;              ///< finite elements that became infinite in the type written
  std::vector<std::string> left_out = {};  ///< names in a state dict of what is no tensor
  std::vector<std::string> not_read = {};  ///< of another program's checkpoint: ForeignCheckpoint::not_read
  std::string first_overflowed = {};       ///< the first tensor with such an element; empty: none
};

/// Writes all parameters (trainable and frozen, under each of their names) and persistent buffers.
/// Every block read is verified. The output is whole or absent. Memory: 64 MiB and tables in proportion to
/// the number of tensors. Throws CheckpointError (what Checkpoint::open and read throw, and what
/// open_model_writer does) and DiskError.
ConsolidateResult consolidate(const ConsolidateOptions& options);

}  // namespace tessera::checkpoint
