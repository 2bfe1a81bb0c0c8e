// BufferPool: the few buffers that gathered units live in, reused instead of allocated every step (fresh
// memory costs a page fault per 4 KiB, and on CUDA a hand-over between streams).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::zero {

/// Not thread-safe. Owns the buffers that are not lent.
class BufferPool {
 public:
  /// Keeps at most `max_free` unused buffers.
  BufferPool(at::Device device, int max_free) : device_(device), max_free_(max_free) {}

  /// Local. A uint8 tensor of at least `bytes`; contents unspecified.
  at::Tensor acquire(int64_t bytes);
  void give_back(at::Tensor buffer);

  int64_t lent_bytes() const { return lent_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }  ///< most bytes owned and lent together

 private:
  at::Device device_;
  int max_free_;
  int num_lent_ = 0;
  std::vector<at::Tensor> free_;
  int64_t lent_bytes_ = 0;
  int64_t free_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace tessera::zero
