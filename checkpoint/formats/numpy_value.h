// numpy's scalars and arrays in a pickle: a dtype and bytes, which are read as data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/formats/pickle.h"

namespace tessera::checkpoint {

/// An array of booleans, integers or floating-point numbers of up to 64 bits. Without dimensions: one number.
struct NumpyArray {
  std::string dtype;  ///< numpy's dtype.str: "<f8", "|b1"
  std::vector<int64_t> shape;
  std::string bytes;  ///< row-major, in the byte order of `dtype`
};

/// A value of Python's: kBool, kInt, kLong, kFloat, or kString of numpy.str_.
struct NumpyScalar {
  PickleValue::Kind kind = PickleValue::Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text;  ///< of kLong and kString
};

/// What numpy's scalar(dtype, bytes) makes, of either byte order. nullopt: a dtype that is not read, or bytes
/// of another length.
std::optional<NumpyScalar> numpy_scalar(const PickleValue& dtype, std::string_view bytes);

/// The array that a value would be. nullopt: it is something else, has another dtype, or its bytes are not
/// those of its shape.
std::optional<NumpyArray> numpy_array(const PickleValue& value);
/// Its elements, row-major.
std::vector<NumpyScalar> elements_of(const NumpyArray& array);

}  // namespace tessera::checkpoint
