// BufferPool: the few buffers that gathered units live in, reused instead of allocated every step (fresh
// memory costs a page fault per 4 KiB, and on CUDA a hand-over between streams).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "core/memory/memory_use.h"

namespace tessera::zero {

/// Lends buffers and keeps a few for the next request. Not thread-safe. Owns the buffers that are not lent.
/// They count as communication buffers, or as what the MemoryFor scope says in which the pool is made.
class BufferPool {
 public:
  /// Keeps at most `max_free` unused buffers, and gives them up rather than own more than `max_bytes` in all.
  /// `alignment`: of their addresses, where libtorch's 64 bytes are too few.
  /// `allocate`: where the buffers come from, in place of libtorch's memory.
  using Allocate = std::function<at::Tensor(int64_t bytes)>;
  BufferPool(at::Device device, int max_free, int64_t alignment = 1,
             int64_t max_bytes = std::numeric_limits<int64_t>::max(), Allocate allocate = {})
      : device_(device),
        max_free_(max_free),
        alignment_(alignment),
        max_bytes_(max_bytes),
        allocate_(std::move(allocate)) {}

  /// A uint8 tensor of at least `bytes`; contents unspecified.
  at::Tensor acquire(int64_t bytes);
  void give_back(at::Tensor buffer);

  int64_t lent_bytes() const { return lent_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }  ///< most bytes owned and lent together

 private:
  at::Tensor allocate(int64_t bytes) const;
  void drop_oldest();
  int64_t owned_bytes() const { return lent_bytes_ + free_bytes_; }

  at::Device device_;
  int max_free_;
  int64_t alignment_;
  int64_t max_bytes_;
  Allocate allocate_;
  MemoryUse use_ = MemoryFor::current().value_or(MemoryUse::kCommunication);
  int num_lent_ = 0;
  std::vector<at::Tensor> free_;
  int64_t lent_bytes_ = 0;
  int64_t free_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace tessera::zero
