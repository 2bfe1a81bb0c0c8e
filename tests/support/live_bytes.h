// LiveBytes: the CPU memory of tensors made on this thread, now and at its peak, counted by an allocator
// around libtorch's. A tensor counts for the thread that made it, also if another thread frees it (Gloo's
// do).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "tests/support/listening_allocator.h"

namespace tessera::testing {

struct ByteCounter {
  std::atomic<int64_t> now{0}, peak{0};
  void add(int64_t bytes) {
    const int64_t sum = now += bytes;
    for (int64_t seen = peak; sum > seen && !peak.compare_exchange_weak(seen, sum);) {
    }
  }
};

/// Counts allocations between construction and destruction, on the thread that made it.
class LiveBytes {
 public:
  LiveBytes() {
    ListeningAllocator<LiveBytes>::install();
    current() = counter_;
  }
  ~LiveBytes() { current() = nullptr; }
  LiveBytes(const LiveBytes&) = delete;

  int64_t now() const { return counter_->now; }
  int64_t peak() const { return counter_->peak; }
  void reset_peak() { counter_->peak = counter_->now.load(); }

 private:
  friend ListeningAllocator<LiveBytes>;
  /// Those of every thread; they may be freed after their LiveBytes has gone.
  struct Blocks {
    struct Block {
      std::shared_ptr<ByteCounter> counter;
      int64_t bytes;
    };
    std::mutex mutex;  ///< guards by_address
    std::unordered_map<void*, Block> by_address;
  };

  static void took(void* data, int64_t bytes) {
    if (!current()) return;
    const std::lock_guard lock(blocks().mutex);
    blocks().by_address[data] = {current(), bytes};
    current()->add(bytes);
  }
  static void gives_back(void* data) {
    const std::lock_guard lock(blocks().mutex);
    const auto found = blocks().by_address.find(data);
    if (found == blocks().by_address.end()) return;
    found->second.counter->add(-found->second.bytes);
    blocks().by_address.erase(found);
  }
  static Blocks& blocks() {
    static Blocks& blocks = *new Blocks;  // outlives every tensor
    return blocks;
  }
  /// This thread's.
  static std::shared_ptr<ByteCounter>& current() {
    static thread_local std::shared_ptr<ByteCounter> counter;
    return counter;
  }

  std::shared_ptr<ByteCounter> counter_ = std::make_shared<ByteCounter>();
};

}  // namespace tessera::testing
