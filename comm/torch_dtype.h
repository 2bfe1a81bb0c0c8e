// DType <-> libtorch's ScalarType.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>

#include "core/check.h"
#include "core/dtype.h"

namespace tessera {

/// By DType.
#define TESSERA_TORCH_TYPE(dtype, name, bytes, torch_type) at::ScalarType::torch_type,
inline constexpr std::array kTorchDTypes{TESSERA_DTYPES(TESSERA_TORCH_TYPE)};
#undef TESSERA_TORCH_TYPE

constexpr at::ScalarType to_torch(DType dtype) { return kTorchDTypes[static_cast<size_t>(dtype)]; }

/// Nothing for a type that has no DType.
constexpr std::optional<DType> find_dtype(at::ScalarType type) {
  for (const DTypeInfo& info : kDTypes)
    if (to_torch(info.dtype) == type) return info.dtype;
  return std::nullopt;
}

/// The same; a type that has no DType is a std::logic_error.
inline DType from_torch(at::ScalarType type) {
  const std::optional<DType> dtype = find_dtype(type);
  TESSERA_CHECK(dtype.has_value(), "no DType for ", c10::toString(type));
  return *dtype;
}

}  // namespace tessera
