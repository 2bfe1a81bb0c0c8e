// DType <-> libtorch's ScalarType.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/dtype.h"

namespace tessera {

inline constexpr std::array<std::pair<DType, at::ScalarType>, kDTypes.size()> kTorchDTypes{{
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
    {DType::kUInt16, at::ScalarType::UInt16},
    {DType::kUInt32, at::ScalarType::UInt32},
    {DType::kUInt64, at::ScalarType::UInt64},
    {DType::kComplex32, at::ScalarType::ComplexHalf},
    {DType::kComplex64, at::ScalarType::ComplexFloat},
    {DType::kComplex128, at::ScalarType::ComplexDouble},
    {DType::kFloat8E5m2, at::ScalarType::Float8_e5m2},
    {DType::kFloat8E4m3fn, at::ScalarType::Float8_e4m3fn},
    {DType::kFloat8E5m2fnuz, at::ScalarType::Float8_e5m2fnuz},
    {DType::kFloat8E4m3fnuz, at::ScalarType::Float8_e4m3fnuz},
    {DType::kFloat8E8m0fnu, at::ScalarType::Float8_e8m0fnu},
    {DType::kFloat4E2m1fnX2, at::ScalarType::Float4_e2m1fn_x2},
    {DType::kBits8, at::ScalarType::Bits8},
    {DType::kBits16, at::ScalarType::Bits16},
    {DType::kBits1x8, at::ScalarType::Bits1x8},
    {DType::kBits2x4, at::ScalarType::Bits2x4},
    {DType::kBits4x2, at::ScalarType::Bits4x2},
    {DType::kInt1, at::ScalarType::Int1},
    {DType::kInt2, at::ScalarType::Int2},
    {DType::kInt3, at::ScalarType::Int3},
    {DType::kInt4, at::ScalarType::Int4},
    {DType::kInt5, at::ScalarType::Int5},
    {DType::kInt6, at::ScalarType::Int6},
    {DType::kInt7, at::ScalarType::Int7},
    {DType::kUInt1, at::ScalarType::UInt1},
    {DType::kUInt2, at::ScalarType::UInt2},
    {DType::kUInt3, at::ScalarType::UInt3},
    {DType::kUInt4, at::ScalarType::UInt4},
    {DType::kUInt5, at::ScalarType::UInt5},
    {DType::kUInt6, at::ScalarType::UInt6},
    {DType::kUInt7, at::ScalarType::UInt7},
}};

static_assert([] {
  for (size_t i = 0; i < kTorchDTypes.size(); ++i)
    if (static_cast<size_t>(kTorchDTypes[i].first) != i) return false;
  return true;
}());

constexpr at::ScalarType to_torch(DType dtype) { return kTorchDTypes[static_cast<size_t>(dtype)].second; }

/// Nothing for a type that has no DType.
constexpr std::optional<DType> find_dtype(at::ScalarType type) {
  for (const auto& [dtype, torch_type] : kTorchDTypes)
    if (torch_type == type) return dtype;
  return std::nullopt;
}

/// The same; a type that has no DType is a std::logic_error.
inline DType from_torch(at::ScalarType type) {
  const std::optional<DType> dtype = find_dtype(type);
  TESSERA_CHECK(dtype.has_value(), "no DType for ", c10::toString(type));
  return *dtype;
}

}  // namespace tessera
