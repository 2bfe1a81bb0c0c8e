// The header of a safetensors file (https://github.com/huggingface/safetensors#format):
//
//   8 bytes   N, the header's length: unsigned, little-endian
//   N bytes   JSON, starts with '{', may be padded with spaces: {"NAME": {"dtype": "F32", "shape": [2, 3],
//             "data_offsets": [BEGIN, END]}, …, "__metadata__": {"key": "text", …}}
//   the rest  the tensors' bytes; offsets count from here; without holes and without overlap
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

/// The reference implementation refuses a longer one.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsTensor {
  std::string name;
  std::vector<int64_t> shape;
  DType type = DType::kFloat32;
  int64_t offset = 0;  ///< in bytes; from the start of the data in a header, from the start of the file in a
                       ///< SafetensorsFile
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  ///< by offset
  std::map<std::string, std::string> metadata;
};

/// Sorts tensors and sets `bytes` and `offset` of each, in the order of the reference implementation:
/// wide types first, so that all tensors are aligned; then by name.
void place_tensors(std::vector<SafetensorsTensor>& tensors);

/// The file's first bytes, up to the data: a multiple of 8. Throws CheckpointError beyond
/// kMaxSafetensorsHeaderBytes and for a tensor named "__metadata__"; messages start with `file`.
std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file);

/// `text` is the N bytes of JSON, `data_bytes` the length of the rest. Memory in proportion to `text`.
/// Throws CheckpointError naming `file`, tensor, found and expected value: for text that is not JSON of this
/// form, keys that are duplicate or unknown, types that are not a DType, offsets that do not fit the shape,
/// leave holes, overlap, or do not end where the file does.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           const std::string& file);

}  // namespace tessera::checkpoint
