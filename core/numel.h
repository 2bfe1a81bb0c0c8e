// The number of elements of a tensor of a shape.
#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// 1 for a shape without dimensions. Requires: the product is within 2^63.
inline int64_t numel_of(std::span<const int64_t> shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

}  // namespace tessera
