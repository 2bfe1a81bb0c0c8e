// Names in a safetensors header: the element types, and the key of the metadata. For checkpoint/formats only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

#include "core/dtype.h"

namespace tessera::checkpoint {

inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";

/// In ascending order: the reference implementation writes tensors of the last type first.
inline constexpr std::array<std::pair<DType, std::string_view>, 10> kSafetensorsTypes = {{
    {DType::kBool, "BOOL"},
    {DType::kUInt8, "U8"},
    {DType::kInt8, "I8"},
    {DType::kInt16, "I16"},
    {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"},
    {DType::kInt32, "I32"},
    {DType::kFloat32, "F32"},
    {DType::kFloat64, "F64"},
    {DType::kInt64, "I64"},
}};

/// Local. Index in kSafetensorsTypes.
inline size_t safetensors_rank(DType type) {
  const auto* found = std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                                   [&](const auto& entry) { return entry.first == type; });
  return static_cast<size_t>(found - kSafetensorsTypes.begin());
}

/// Local. "F32".
inline std::string_view safetensors_type(DType type) {
  return kSafetensorsTypes[safetensors_rank(type)].second;
}

}  // namespace tessera::checkpoint
