// DType <-> libtorch's ScalarType.
#pragma once

#include <c10/core/ScalarType.h>

#include "core/check.h"
#include "core/dtype.h"

namespace tessera {

inline at::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return at::kDouble;
    case DType::kFloat32: return at::kFloat;
    case DType::kBFloat16: return at::kBFloat16;
    case DType::kFloat16: return at::kHalf;
    case DType::kInt64: return at::kLong;
    case DType::kInt32: return at::kInt;
    case DType::kInt16: return at::kShort;
    case DType::kInt8: return at::kChar;
    case DType::kUInt8: return at::kByte;
    case DType::kBool: return at::kBool;
  }
  return at::kFloat;
}

/// Local. A type without a DType is a std::logic_error.
inline DType from_torch(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kLong: return DType::kInt64;
    case at::kInt: return DType::kInt32;
    case at::kShort: return DType::kInt16;
    case at::kChar: return DType::kInt8;
    case at::kByte: return DType::kUInt8;
    case at::kBool: return DType::kBool;
    default: TESSERA_CHECK(false, "no DType for ", c10::toString(type)); return DType::kFloat32;
  }
}

}  // namespace tessera
