// Writes safetensors: one file, or Hugging Face's shards with an index.
//
// Tied names in safetensors.
// The format forbids two tensors to share bytes. Each name of a tied tensor is written with its own copy of
// the bytes, so that a plain load_file() has all names that load_state_dict() needs.
#pragma once

#include <memory>

#include "checkpoint/formats/model_writer.h"

namespace tessera::checkpoint {

/// One file; with max_shard_bytes a folder with the shards and, when there are several,
/// model.safetensors.index.json: {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}. An existing
/// folder is replaced in one step; its other files are kept, weights of an earlier call are not. Throws as
/// open_model_writer and PendingDirectory.
std::unique_ptr<ModelWriter> open_safetensors_writer(const Disk& disk, ModelWriterOptions options);

}  // namespace tessera::checkpoint
