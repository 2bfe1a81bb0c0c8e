// Reader of IDX files, the format of MNIST and Fashion-MNIST: a big-endian header (two zero bytes, a type,
// the number of dimensions, each dimension as 32 bits), then the values in row-major order.
// http://yann.lecun.com/exdb/mnist describes it. Files may be gzip-compressed or plain.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera::examples {

/// Unsigned bytes of any shape. Read-only; copies share the bytes.
struct IdxArray {
  std::vector<int64_t> shape;
  std::span<const uint8_t> values;      ///< row-major, product(shape) of them
  std::shared_ptr<const void> storage;  ///< owns the memory of `values`: a buffer or a mapped file
};

/// Means, in an expected shape, that any size of this dimension is accepted.
inline constexpr int64_t kAnySize = -1;

/// Reads `path` and checks it against `expected_shape`. A plain file is mapped, so that the ranks of
/// a host share its memory; it must not be shortened while it is in use. A compressed file is read
/// completely. Throws DataError naming the file, what was found and what was expected, if it is missing,
/// damaged, truncated, longer than its header says, or of another type or shape. Memory is allocated as the
/// values are read, so a wrong header cannot cause a large allocation.
IdxArray read_idx(const std::string& path, const std::vector<int64_t>& expected_shape);

}  // namespace tessera::examples
