// DType <-> libtorch's ScalarType.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/dtype.h"

namespace tessera {

inline constexpr std::array<std::pair<DType, at::ScalarType>, 10> kTorchDTypes{{
    {DType::kFloat32, at::kFloat},
    {DType::kBFloat16, at::kBFloat16},
    {DType::kFloat16, at::kHalf},
    {DType::kFloat64, at::kDouble},
    {DType::kInt64, at::kLong},
    {DType::kInt32, at::kInt},
    {DType::kInt16, at::kShort},
    {DType::kInt8, at::kChar},
    {DType::kUInt8, at::kByte},
    {DType::kBool, at::kBool},
}};

static_assert([] {
  for (size_t i = 0; i < kTorchDTypes.size(); ++i)
    if (static_cast<size_t>(kTorchDTypes[i].first) != i) return false;
  return true;
}());

constexpr at::ScalarType to_torch(DType dtype) { return kTorchDTypes[static_cast<size_t>(dtype)].second; }

/// Local. Nothing for a type that has no DType.
constexpr std::optional<DType> find_dtype(at::ScalarType type) {
  for (const auto& [dtype, torch_type] : kTorchDTypes)
    if (torch_type == type) return dtype;
  return std::nullopt;
}

/// Local. The same; a type that has no DType is a std::logic_error.
inline DType from_torch(at::ScalarType type) {
  const std::optional<DType> dtype = find_dtype(type);
  TESSERA_CHECK(dtype.has_value(), "no DType for ", c10::toString(type));
  return *dtype;
}

}  // namespace tessera
