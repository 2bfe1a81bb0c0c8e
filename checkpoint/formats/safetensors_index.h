// model.safetensors.index.json: which tensor of a model in shards is in which file, as transformers writes
// it: {"metadata": {…}, "weight_map": {"encoder.weight": "model-00001-of-00002.safetensors", …}}
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

inline constexpr const char* kSafetensorsIndexName = "model.safetensors.index.json";

/// Local. The weight_map: file by name of tensor. Bounded: memory in proportion to `text`, and what stands in
/// metadata is skipped. Throws CheckpointError naming `file` for text that is no JSON of this form, tensors
/// that occur twice, and files that are not in the index's own folder.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& file);

}  // namespace tessera::checkpoint
