#include "zero/memory/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "zero/memory/pause_listening.h"

namespace tessera::zero {

at::Tensor BufferPool::allocate(int64_t bytes) const {
  const MemoryFor use(use_);
  const BelowModes below_modes;
  const int64_t alignment = options_.alignment, with_alignment = bytes + alignment - 1;
  const at::Tensor memory =
      options_.allocate
          ? options_.allocate(with_alignment)
          : at::empty({with_alignment}, at::TensorOptions().dtype(at::kByte).device(options_.device));
  const int64_t past = reinterpret_cast<intptr_t>(memory.data_ptr()) % alignment;
  return memory.narrow(0, past == 0 ? 0 : alignment - past, bytes);
}

void BufferPool::drop_oldest() {
  if (free_.empty()) return;
  if (options_.transfer != nullptr) options_.transfer->synchronize(free_.front().free);
  free_bytes_ -= free_.front().memory.nbytes();
  free_.erase(free_.begin());
}

BufferPool::Buffer BufferPool::acquire(int64_t bytes) {
  // The smallest free buffer that is large enough, unless it would waste half of itself. Where copies run,
  // the one that was given back longest ago.
  comm::HostTransfer* const transfer = options_.transfer;
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto size = static_cast<int64_t>(it->memory.nbytes());
    const bool better =
        best == free_.end() || (transfer == nullptr && it->memory.nbytes() < best->memory.nbytes());
    if (size >= bytes && size <= 2 * bytes && better &&
        (transfer == nullptr || all_made() || transfer->query(it->free)))
      best = it;
  }
  Buffer buffer;
  if (best != free_.end()) {
    buffer = std::move(*best);
    free_.erase(best);
    free_bytes_ -= buffer.memory.nbytes();
  } else {
    // The sizes wanted have changed: let the oldest unused one go rather than own more and more.
    if (all_made()) drop_oldest();
    while (!free_.empty() &&
           ((transfer != nullptr && all_made()) || owned_bytes() + bytes > options_.max_bytes))
      drop_oldest();
    buffer = {allocate(bytes)};
  }
  ++num_lent_;
  lent_bytes_ += buffer.memory.nbytes();
  peak_bytes_ = std::max(peak_bytes_, owned_bytes());
  return buffer;
}

void BufferPool::give_back(Buffer buffer) {
  --num_lent_;
  const auto bytes = static_cast<int64_t>(buffer.memory.nbytes());
  lent_bytes_ -= bytes;
  const bool too_many =
      static_cast<int>(free_.size()) >= options_.max_free || owned_bytes() + bytes > options_.max_bytes;
  if (options_.transfer == nullptr && too_many) return;
  free_bytes_ += bytes;
  free_.push_back(std::move(buffer));
}

}  // namespace tessera::zero
