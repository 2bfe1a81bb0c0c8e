// BufferPool: the few buffers that gathered units live in, and that state passes through on its way between
// the host and the device, reused instead of allocated every step (fresh memory costs a page fault per 4 KiB,
// and on CUDA a hand-over between streams).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "comm/memory/host_transfer.h"
#include "core/memory/memory_use.h"

namespace tessera::zero {

/// Lends buffers and keeps a few for the next request. Not thread-safe. Owns the buffers that are not lent.
/// They count as communication buffers, or as what the MemoryFor scope says in which the pool is made.
class BufferPool {
 public:
  struct Buffer {
    at::Tensor memory = {};         ///< uint8
    comm::EventPtr free = nullptr;  ///< from when on it may be written, where copies run
    at::Tensor view(int64_t numel, at::ScalarType dtype) const {
      return memory.narrow(0, 0, numel * static_cast<int64_t>(at::elementSize(dtype))).view(dtype);
    }
  };
  struct Options {
    at::Device device = at::kCPU;
    int max_free = 0;       ///< unused buffers that are kept
    int64_t alignment = 1;  ///< of their addresses, where libtorch's 64 bytes are too few
    /// Unused buffers are given up rather than own more than this in all.
    int64_t max_bytes = std::numeric_limits<int64_t>::max();
    /// Where the buffers come from, in place of libtorch's memory.
    std::function<at::Tensor(int64_t bytes)> allocate = {};
    /// The copies that the buffers are for; null: there are none. Then all that are given back are kept, and
    /// `max_free` are made before one is lent again whose copy runs.
    comm::HostTransfer* transfer = nullptr;
  };
  explicit BufferPool(Options options) : options_(std::move(options)) {}

  /// A buffer of at least `bytes`; contents unspecified.
  Buffer acquire(int64_t bytes);
  /// The copy that ends at `buffer.free` is the last that uses it.
  void give_back(Buffer buffer);

  int64_t lent_bytes() const { return lent_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }  ///< most bytes owned and lent together

 private:
  at::Tensor allocate(int64_t bytes) const;
  void drop_oldest();
  bool all_made() const { return num_lent_ + static_cast<int>(free_.size()) >= options_.max_free; }
  int64_t owned_bytes() const { return lent_bytes_ + free_bytes_; }

  const Options options_;
  MemoryUse use_ = MemoryFor::current().value_or(MemoryUse::kCommunication);
  int num_lent_ = 0;
  std::vector<Buffer> free_;  // given back longest ago first
  int64_t lent_bytes_ = 0;
  int64_t free_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace tessera::zero
