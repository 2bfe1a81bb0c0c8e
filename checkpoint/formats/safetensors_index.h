// model.safetensors.index.json: the file of each tensor of a model in shards, as transformers writes it:
// {"metadata": {…}, "weight_map": {"encoder.weight": "model-00001-of-00002.safetensors", …}}
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

inline constexpr const char* kSafetensorsIndexName = "model.safetensors.index.json";

/// The weight_map: file by name of tensor. Memory in proportion to `text`; other keys are skipped.
/// Throws CheckpointError naming `file` for text that is not JSON of this form, duplicate tensors, and files
/// outside of the index's folder.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& file);

}  // namespace tessera::checkpoint
