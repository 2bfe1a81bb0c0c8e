#include "zero/memory/staging_pool.h"

#include <algorithm>
#include <utility>

namespace tessera::zero {

StagingPool::Buffer StagingPool::take(int64_t bytes) {
  const auto fits = [&](const Buffer& one) {
    const auto size = static_cast<int64_t>(one.memory.nbytes());
    return size >= bytes && size <= 2 * bytes;
  };
  const bool all_made = num_lent_ + static_cast<int>(free_.size()) >= num_buffers_;
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const Buffer& one) {
    return fits(one) && (all_made || transfer_.query(one.free));
  });
  ++num_lent_;
  if (found != free_.end()) {
    Buffer buffer = std::move(*found);
    free_.erase(found);
    return buffer;
  }
  // The sizes wanted have changed.
  while (!free_.empty() && num_lent_ + static_cast<int>(free_.size()) > num_buffers_) {
    transfer_.synchronize(free_.front().free);
    free_.erase(free_.begin());
  }
  return {allocate_(bytes), nullptr};
}

void StagingPool::give_back(Buffer buffer) {
  --num_lent_;
  free_.push_back(std::move(buffer));
}

}  // namespace tessera::zero
