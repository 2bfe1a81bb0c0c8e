// DType <-> libtorch's ScalarType.
#pragma once

#include <c10/core/ScalarType.h>

#include "core/check.h"
#include "core/dtype.h"

namespace tessera::zero {

inline at::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return at::kDouble;
    case DType::kFloat32: return at::kFloat;
    case DType::kBFloat16: return at::kBFloat16;
    case DType::kFloat16: return at::kHalf;
  }
  return at::kFloat;
}

inline DType from_torch(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: TESSERA_CHECK(false, "no DType for ", c10::toString(type)); return DType::kFloat32;
  }
}

}  // namespace tessera::zero
