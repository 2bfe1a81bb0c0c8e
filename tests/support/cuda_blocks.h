// CudaBlocks: the blocks that libtorch's caching allocator of CUDA gives for a row of requests, and what it
// reserves for them, by its rules (c10/cuda/CUDACachingAllocator.cpp, with the constants of
// c10/core/AllocatorConfig.h). ReportedAsCuda: this thread's CPU tensors, reported to libtorch's profiler as
// if they were such blocks.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>

#include "tests/support/listening_allocator.h"

namespace tessera::testing {

class CudaBlocks {
 public:
  /// `expandable`: PYTORCH_ALLOC_CONF=expandable_segments:True.
  explicit CudaBlocks(bool expandable) : expandable_(expandable) {}

  /// Returns an address, of a space of its own, and the block's size.
  std::pair<int64_t, int64_t> take(int64_t bytes) {
    const int64_t size = round_up(std::max<int64_t>(bytes, 1), kMin);
    const bool small = size <= kSmall;
    auto best = blocks_.end();
    for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
      const bool fits = !it->second.used && it->second.small == small && it->second.size >= size;
      if (fits && (best == blocks_.end() || it->second.size < best->second.size)) best = it;
    }
    if (best == blocks_.end()) best = new_segment(size, small);
    Block& block = best->second;
    if (const int64_t rest = block.size - size; small || expandable_ ? rest >= kMin : rest > kSmall) {
      blocks_[best->first + size] = {rest, block.segment, small, /*used=*/false};
      block.size = size;
    }
    block.used = true;
    allocated_ += block.size;
    return {best->first, block.size};
  }

  /// Returns the block's size.
  int64_t give_back(int64_t address) {
    auto block = blocks_.find(address);
    const int64_t size = block->second.size;
    block->second.used = false;
    allocated_ -= size;
    if (const auto next = std::next(block); next != blocks_.end()) merge(block, next);
    if (block != blocks_.begin()) merge(std::prev(block), block);
    return size;
  }

  int64_t allocated() const { return allocated_; }
  int64_t reserved() const { return reserved_; }

 private:
  static constexpr auto kMin = static_cast<int64_t>(c10::CachingAllocator::kMinBlockSize);
  static constexpr auto kSmall = static_cast<int64_t>(c10::CachingAllocator::kSmallSize);
  struct Block {
    int64_t size = 0;
    int segment = 0;
    bool small = false;
    bool used = false;
  };
  using Blocks = std::map<int64_t, Block>;

  static int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  }

  static int64_t segment_size(int64_t size) {
    if (size <= kSmall) return c10::CachingAllocator::kSmallBuffer;
    if (size < static_cast<int64_t>(c10::CachingAllocator::kMinLargeAlloc)) return int64_t{20} << 20;
    return round_up(size, c10::CachingAllocator::kRoundLarge);
  }

  Blocks::iterator new_segment(int64_t size, bool small) {
    const int64_t bytes = segment_size(size);
    reserved_ += bytes;
    const int64_t address = std::exchange(next_address_, next_address_ + bytes);
    return blocks_.emplace(address, Block{bytes, num_segments_++, small, false}).first;
  }

  void merge(Blocks::iterator first, Blocks::iterator second) {
    if (first->second.used || second->second.used || first->second.segment != second->second.segment) return;
    first->second.size += second->second.size;
    blocks_.erase(second);
  }

  const bool expandable_;
  Blocks blocks_;
  int num_segments_ = 0;
  int64_t next_address_ = 0, allocated_ = 0, reserved_ = 0;
};

class ReportedAsCuda {
 public:
  explicit ReportedAsCuda(bool expandable) : blocks_(expandable) {
    ListeningAllocator<ReportedAsCuda>::install();
    current() = this;
  }
  ~ReportedAsCuda() { current() = nullptr; }
  ReportedAsCuda(const ReportedAsCuda&) = delete;

  const CudaBlocks& blocks() const { return blocks_; }

 private:
  friend ListeningAllocator<ReportedAsCuda>;
  static void took(void* data, int64_t bytes) {
    ReportedAsCuda* const self = current();
    if (self == nullptr) return;
    const auto [address, size] = self->blocks_.take(bytes);
    self->addresses_[data] = address;
    self->report(data, size);
  }
  static void gives_back(void* data) {
    ReportedAsCuda* const self = current();
    if (self == nullptr) return;
    const auto found = self->addresses_.find(data);
    if (found == self->addresses_.end()) return;
    self->report(data, -self->blocks_.give_back(found->second));
    self->addresses_.erase(found);
  }
  void report(void* data, int64_t bytes) const {
    c10::reportMemoryUsageToProfiler(data, bytes, static_cast<size_t>(blocks_.allocated()),
                                     static_cast<size_t>(blocks_.reserved()), c10::Device(c10::kCUDA, 0));
  }
  /// This thread's.
  static ReportedAsCuda*& current() {
    static thread_local ReportedAsCuda* current = nullptr;
    return current;
  }

  CudaBlocks blocks_;
  std::unordered_map<void*, int64_t> addresses_;
};

}  // namespace tessera::testing
