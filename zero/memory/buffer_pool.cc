#include "zero/memory/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace tessera::zero {

at::Tensor BufferPool::allocate(int64_t bytes) const {
  const MemoryFor use(use_);
  const int64_t with_alignment = bytes + alignment_ - 1;
  const at::Tensor memory =
      allocate_ ? allocate_(with_alignment)
                : at::empty({with_alignment}, at::TensorOptions().dtype(at::kByte).device(device_));
  const int64_t past = reinterpret_cast<intptr_t>(memory.data_ptr()) % alignment_;
  return memory.narrow(0, past == 0 ? 0 : alignment_ - past, bytes);
}

void BufferPool::drop_oldest() {
  if (free_.empty()) return;
  free_bytes_ -= free_.front().nbytes();
  free_.erase(free_.begin());
}

at::Tensor BufferPool::acquire(int64_t bytes) {
  // The smallest free buffer that is large enough, unless it would waste half of itself.
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto size = static_cast<int64_t>(it->nbytes());
    if (size >= bytes && size <= 2 * bytes && (best == free_.end() || it->nbytes() < best->nbytes()))
      best = it;
  }
  at::Tensor buffer;
  if (best != free_.end()) {
    buffer = std::move(*best);
    free_.erase(best);
    free_bytes_ -= buffer.nbytes();
  } else {
    // The sizes wanted have changed: let the oldest unused one go rather than own more and more.
    if (num_lent_ + static_cast<int>(free_.size()) >= max_free_) drop_oldest();
    while (!free_.empty() && owned_bytes() + bytes > max_bytes_) drop_oldest();
    buffer = allocate(bytes);
  }
  ++num_lent_;
  lent_bytes_ += buffer.nbytes();
  peak_bytes_ = std::max(peak_bytes_, owned_bytes());
  return buffer;
}

void BufferPool::give_back(at::Tensor buffer) {
  --num_lent_;
  lent_bytes_ -= buffer.nbytes();
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  if (static_cast<int>(free_.size()) >= max_free_ || owned_bytes() + bytes > max_bytes_) return;
  free_bytes_ += buffer.nbytes();
  free_.push_back(std::move(buffer));
}

}  // namespace tessera::zero
