// convert_checkpoint(): writes a checkpoint again, as other programs write theirs, so that a run goes on
// there with the numbers that it would have had: weights, optimizer states, counts of updates, param groups,
// the schedule's place, the loss scale, the user's client state.
//
// Tensors pass through a few buffers of fixed size: one thread reads and verifies, the caller's thread
// converts and writes. Memory is that, 64 MiB, and tables in proportion to the number of tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/sharded/manifest.h"
#include "core/dtype.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

enum class ConvertTarget : uint8_t {
  kTessera,      ///< docs/checkpoint_format.md, of one rank
  kUniversal,    ///< DeepSpeed's universal checkpoint
  kDistributed,  ///< torch.distributed.checkpoint, which FSDP2 reads
  kTorch,        ///< the weights alone, as torch.save writes a state_dict
  kSafetensors,  ///< the weights alone, here and below
  kHdf5,
};

/// "tessera", "universal", "dcp", and of weights alone ModelFormat's: "pt", "safetensors", "h5".
std::string_view name_of(ConvertTarget target);
std::optional<ConvertTarget> parse_convert_target(std::string_view word);
bool is_weights_alone(ConvertTarget target);

struct ConvertOptions {
  std::filesystem::path directory = {};  ///< of checkpoints
  std::string tag = {};                  ///< empty: the one `latest` names
  /// A folder of checkpoints (kTessera, kUniversal), a checkpoint's folder (kDistributed), a file (of weights
  /// alone; with max_shard_bytes a folder).
  std::filesystem::path output = {};
  ConvertTarget target = ConvertTarget::kDistributed;
  /// Type of the model's floating-point tensors: fp32, bf16 or fp16; trainable parameters come from their
  /// fp32 masters. nullopt: fp32; of kDistributed, those that are not trainable as they were saved. Not for
  /// kTessera and kUniversal, whose weights are fp32 masters.
  std::optional<DType> dtype = {};
  int64_t max_shard_bytes = 0;  ///< see ModelWriterOptions
  /// Gives what the configuration's schedule has set in the options of each param group by then, such as
  /// {"lr": 1e-4}; empty: not known. It is asked of runs that were no Python programs: their checkpoints have
  /// the configuration alone.
  std::function<std::vector<nlohmann::json>(const Manifest& manifest)> scheduled_options = {};
  DiskOptions disk = {};
  std::function<void(int64_t done, int64_t total)> progress =
      {};  ///< called with the bytes written and the total
};

struct ConvertResult {
  std::filesystem::path checkpoint;     ///< DIR/TAG, which was read
  std::filesystem::path output;         ///< what was written
  int64_t num_tensors = 0;              ///< of the model; a tied tensor counts once
  int64_t num_names = 0;                ///< of weights alone: all names, also those of tied tensors
  int64_t numel = 0;                    ///< elements of these
  int64_t bytes = 0;                    ///< of all tensors written
  int64_t num_overflowed = 0;           ///< finite elements that became infinite in the type written
  std::string first_overflowed = {};    ///< the first tensor with such an element; empty: none
  std::vector<std::string> notes = {};  ///< what could not be carried over, a line each
  /// Names in a state dict of what get_extra_state() gave, and the target does not hold.
  std::vector<std::string> extra_state = {};
};

/// Every block read is verified. The output is whole or absent. Throws CheckpointError (what Checkpoint::open
/// and read throw; a checkpoint that the target cannot hold, with the reason) and DiskError.
ConvertResult convert_checkpoint(const ConvertOptions& options);

}  // namespace tessera::checkpoint
