// Writes safetensors: one file, or Hugging Face's shards with an index.
//
// Tied names in safetensors.
// The format forbids two tensors to share bytes. Each name of a tied tensor is written with its own copy of
// the bytes, so that a plain load_file() has all names that load_state_dict() needs.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/formats/model_writer.h"

namespace tessera::checkpoint {

/// Computes the layout of one safetensors file. Immutable.
class SafetensorsLayout {
 public:
  /// Computes the layout of a file with the tensors `chosen` (indices into `tensors`) under all their names.
  /// `file` names it in errors. Throws CheckpointError as format_safetensors_header.
  SafetensorsLayout(const std::vector<ModelTensor>& tensors, const std::vector<size_t>& chosen,
                    const std::string& file);

  /// The header, to be written at byte 0; `hashes` are the block hashes by index of tensor, of all
  /// chosen ones.
  std::string head(const std::map<size_t, std::vector<uint64_t>>& hashes) const;
  int64_t file_bytes() const { return file_bytes_; }
  /// Offsets in the file of the bytes of tensor `index`, one for each of its names.
  const std::vector<int64_t>& positions(size_t index) const { return positions_.at(index); }

 private:
  std::string head_;                   // with zeros as hashes
  std::vector<size_t> in_file_order_;  // indices of the tensors, once for each name
  int64_t file_bytes_ = 0;
  std::map<size_t, std::vector<int64_t>> positions_;
};

/// The indices of the tensors in each shard, as save_pretrained splits them (huggingface_hub's
/// split_torch_state_dict_into_shards): in order, with a new shard when the next tensor would exceed
/// `max_bytes`, and a separate shard for a tensor larger than that. All names of a tied tensor are in one
/// shard, and the bytes of each count.
std::vector<std::vector<size_t>> plan_shards(const std::vector<ModelTensor>& tensors, int64_t max_bytes);

/// "model.safetensors" of one, "model-00002-of-00005.safetensors" of several. `shard` counts from 0.
std::string shard_file_name(size_t shard, size_t num_shards);

/// One file; see open_model_writer.
std::unique_ptr<ModelWriter> open_safetensors_file(const Disk& disk, ModelWriterOptions options);

/// A folder with the shards and, when there are several, model.safetensors.index.json: {"metadata":
/// {"total_size": BYTES}, "weight_map": {NAME: FILE}}. An existing folder is replaced in one step; its other
/// files are kept, weights of an earlier call are not. Also throws as PendingDirectory.
std::unique_ptr<ModelWriter> open_safetensors_shards(const Disk& disk, ModelWriterOptions options);

}  // namespace tessera::checkpoint
