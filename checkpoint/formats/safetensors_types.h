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

/// The types are in ascending order: the reference implementation writes tensors of the last type first. Its
/// F4 counts numbers, of which torch's type has two an element, so it stands for none of ours.
inline constexpr std::array<std::pair<DType, std::string_view>, 19> kSafetensorsTypes = {{
    {DType::kBool, "BOOL"},
    {DType::kUInt8, "U8"},
    {DType::kInt8, "I8"},
    {DType::kFloat8E5m2, "F8_E5M2"},
    {DType::kFloat8E4m3fn, "F8_E4M3"},
    {DType::kFloat8E8m0fnu, "F8_E8M0"},
    {DType::kFloat8E4m3fnuz, "F8_E4M3FNUZ"},
    {DType::kFloat8E5m2fnuz, "F8_E5M2FNUZ"},
    {DType::kInt16, "I16"},
    {DType::kUInt16, "U16"},
    {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"},
    {DType::kInt32, "I32"},
    {DType::kUInt32, "U32"},
    {DType::kFloat32, "F32"},
    {DType::kComplex64, "C64"},
    {DType::kFloat64, "F64"},
    {DType::kInt64, "I64"},
    {DType::kUInt64, "U64"},
}};

/// Whether the format has the type.
inline bool is_safetensors_type(DType type) {
  return std::any_of(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                     [&](const auto& entry) { return entry.first == type; });
}

/// Index in kSafetensorsTypes, which has the type.
inline size_t safetensors_rank(DType type) {
  const auto* found = std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                                   [&](const auto& entry) { return entry.first == type; });
  return static_cast<size_t>(found - kSafetensorsTypes.begin());
}

/// "F32".
inline std::string_view safetensors_type(DType type) {
  return kSafetensorsTypes[safetensors_rank(type)].second;
}

}  // namespace tessera::checkpoint
