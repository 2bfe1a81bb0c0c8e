// Reader of IDX files, the format of MNIST and Fashion-MNIST: a big-endian header (two zero bytes, a type,
// the number of dimensions, each dimension as 32 bits), then the values in row-major order.
// http://yann.lecun.com/exdb/mnist describes it. Files may be gzip-compressed or plain.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// Unsigned bytes of any shape.
struct IdxArray {
  std::vector<int64_t> shape;
  std::vector<uint8_t> values;  ///< row-major, product(shape) of them
};

/// Dimension of an expected shape that may be anything.
inline constexpr int64_t kAnySize = -1;

/// Local. Reads `path` completely and checks it against `expected_shape`. Throws DataError naming the file, what
/// was found and what was expected, when it is missing, damaged, truncated, longer than its header says, of another
/// type or of another shape. Memory is taken as the values arrive, so a header that lies costs nothing.
IdxArray read_idx(const std::string& path, const std::vector<int64_t>& expected_shape);

}  // namespace tessera::examples
