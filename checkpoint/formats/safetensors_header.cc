#include "checkpoint/formats/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/safetensors_types.h"
#include "core/str.h"

namespace tessera::checkpoint {

void place_tensors(std::vector<SafetensorsTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    const size_t rank_a = safetensors_rank(a.type), rank_b = safetensors_rank(b.type);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  int64_t offset = 0;
  for (SafetensorsTensor& tensor : tensors) {
    tensor.offset = offset;
    tensor.bytes = size_bytes(tensor.type);
    for (const int64_t size : tensor.shape) tensor.bytes *= size;
    offset += tensor.bytes;
  }
}

std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file) {
  std::string json = "{";
  const char* separator = "";
  if (!header.metadata.empty()) {
    json += str("\"", kSafetensorsMetadata, "\":", nlohmann::json(header.metadata).dump());
    separator = ",";
  }
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.name == kSafetensorsMetadata)
      throw CheckpointError(
          str(file, ": a safetensors file cannot hold a tensor named ", kSafetensorsMetadata));
    json += str(separator, nlohmann::json(tensor.name).dump(), ":{\"dtype\":\"",
                safetensors_type(tensor.type), "\",\"shape\":[", join(tensor.shape, ","),
                "],\"data_offsets\":[", tensor.offset, ",", tensor.offset + tensor.bytes, "]}");
    separator = ",";
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(json.size()) > kMaxSafetensorsHeaderBytes)
    throw CheckpointError(str(file, ": the header has ", json.size(), " bytes, and readers take ",
                              kMaxSafetensorsHeaderBytes,
                              " at most; the model has too many tensors for one file, shards can hold it"));
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return out + json;
}

}  // namespace tessera::checkpoint
