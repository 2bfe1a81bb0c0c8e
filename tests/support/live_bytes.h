// LiveBytes: the CPU memory of tensors made on this thread, now and at its peak, counted by an allocator
// around libtorch's. A tensor counts for the thread that made it, also if another thread frees it (Gloo's
// do).
#pragma once

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace tessera::testing {

struct ByteCounter {
  std::atomic<int64_t> now{0}, peak{0};
  void add(int64_t bytes) {
    const int64_t sum = now += bytes;
    for (int64_t seen = peak; sum > seen && !peak.compare_exchange_weak(seen, sum);) {
    }
  }
};

/// Installed by the first LiveBytes, and never removed. Allocations of threads without a LiveBytes are not
/// counted.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = inner_->raw_allocate(bytes);
    if (data != nullptr && counter()) {
      const std::lock_guard lock(mutex_);
      blocks_[data] = {counter(), static_cast<int64_t>(bytes)};
      counter()->add(static_cast<int64_t>(bytes));
    }
    return {data, data, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  /// This thread's.
  static std::shared_ptr<ByteCounter>& counter() {
    static thread_local std::shared_ptr<ByteCounter> counter;
    return counter;
  }
  static CountingAllocator& instance() {
    static CountingAllocator& allocator = *new CountingAllocator;  // outlives every tensor
    static const bool installed = (c10::SetCPUAllocator(&allocator, /*priority=*/100), true);
    (void)installed;
    return allocator;
  }

 private:
  struct Block {
    std::shared_ptr<ByteCounter> counter;
    int64_t bytes;
  };
  static void free(void* data) {
    CountingAllocator& self = instance();
    if (data != nullptr) {
      const std::lock_guard lock(self.mutex_);
      if (const auto found = self.blocks_.find(data); found != self.blocks_.end()) {
        found->second.counter->add(-found->second.bytes);
        self.blocks_.erase(found);
      }
    }
    self.inner_->raw_deleter()(data);
  }
  c10::Allocator* inner_ = c10::GetCPUAllocator();
  std::mutex mutex_;  ///< guards blocks_
  std::unordered_map<void*, Block> blocks_;
};

/// Counts allocations between construction and destruction, on the thread that made it.
class LiveBytes {
 public:
  LiveBytes() {
    CountingAllocator::instance();
    CountingAllocator::counter() = counter_;
  }
  ~LiveBytes() { CountingAllocator::counter() = nullptr; }
  LiveBytes(const LiveBytes&) = delete;

  int64_t now() const { return counter_->now; }
  int64_t peak() const { return counter_->peak; }
  void reset_peak() { counter_->peak = counter_->now.load(); }

 private:
  std::shared_ptr<ByteCounter> counter_ = std::make_shared<ByteCounter>();
};

}  // namespace tessera::testing
