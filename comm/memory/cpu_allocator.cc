#include "comm/memory/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/memory/allocation_failure.h"
#include "core/memory/available_memory.h"
#include "core/variables.h"

namespace tessera::comm {
namespace {

// [Note: large blocks] A block of a megabyte and more is a mapping of its own, of huge pages where the system
// has them (madvise), which cost 1/512 of the page faults. A freed one is kept for the next that is up to an
// eighth smaller. But blocks in use and kept together never exceed the most that was in use at once, in this
// step or the last: before they would, kept ones are returned to the system, the oldest first. So keeping
// them costs no memory: it never raises a process's peak, whatever the sizes of tensors.
//
// A smaller block is malloc's, of its size and 64 bytes, aligned within: unlike an aligned block of glibc, it
// fits where one of its size was freed.

constexpr size_t kLarge = 1 << 20, kPage = 4096, kHugePage = 2 << 20, kAlignment = 64;

// glibc raises both bounds by itself, up to the size of a large block that the program happens to free.
// Without such a block, the end of the heap is returned to the system and faulted in again in every step: 3 %
// of one.
constexpr int kHeapEndKept = 8 << 20, kMappedByMalloc = 8 << 20;  // bytes

/// Stands in front of each block.
struct Header {
  std::byte* start;  ///< what malloc or mmap gave
  size_t capacity;   ///< of a large block; 0: malloc's
};
static_assert(sizeof(Header) <= alignof(std::max_align_t));

Header& header_of(void* data) { return static_cast<Header*>(data)[-1]; }

std::byte* round_up(std::byte* address, size_t alignment) {
  return address + (alignment - reinterpret_cast<uintptr_t>(address) % alignment) % alignment;
}

void unmap(void* data) {
  const Header header = header_of(data);
  ::munmap(header.start, static_cast<size_t>(static_cast<std::byte*>(data) - header.start) + header.capacity);
}

/// Null when there is no memory.
void* map(size_t capacity) {
  const size_t alignment = capacity >= kHugePage ? kHugePage : kPage;
  const size_t bytes = kPage + capacity + alignment;
  void* const mapping = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapping);
  std::byte* const data = round_up(begin + kPage, alignment);
  std::byte *const start = data - kPage, *const end = data + capacity;
  if (start != begin) ::munmap(begin, static_cast<size_t>(start - begin));
  if (end != begin + bytes) ::munmap(end, static_cast<size_t>(begin + bytes - end));
  if (capacity >= kHugePage) ::madvise(data, capacity, MADV_HUGEPAGE);
  header_of(data) = {start, capacity};
  return data;
}

void* small_block(size_t bytes) {
  auto* const start = static_cast<std::byte*>(std::malloc(bytes + kAlignment));
  if (start == nullptr) return nullptr;
  std::byte* const data = round_up(start + sizeof(Header), kAlignment);
  header_of(data) = {start, 0};
  return data;
}

/// Keeps large blocks that were freed. Thread-safe.
class LargeBlockCache {
 public:
  void* take(size_t bytes) {
    const size_t capacity = (bytes + kPage - 1) / kPage * kPage;
    {
      Returned returned;
      const std::lock_guard lock(mutex_);
      if (void* const data = take_kept(capacity)) return data;
      in_use_ += capacity;
      trim(returned.blocks);
    }
    void* data = map(capacity);
    if (data == nullptr) {  // without what is kept there may be room
      return_all();
      data = map(capacity);
    }
    const std::lock_guard lock(mutex_);
    if (data == nullptr) in_use_ -= capacity;
    peak_ = std::max(peak_, in_use_);
    return data;
  }

  void keep(void* data) {
    const size_t capacity = header_of(data).capacity;
    Returned returned;
    const std::lock_guard lock(mutex_);
    in_use_ -= capacity;
    kept_bytes_ += capacity;
    by_age_.emplace(next_age_, by_capacity_.emplace(capacity, Kept{data, next_age_}));
    ++next_age_;
    trim(returned.blocks);
  }

  void begin_step() {
    Returned returned;
    const std::lock_guard lock(mutex_);
    last_peak_ = std::exchange(peak_, in_use_);
    trim(returned.blocks);
  }

  LargeBlocks bytes() {
    const std::lock_guard lock(mutex_);
    return {static_cast<int64_t>(in_use_), static_cast<int64_t>(kept_bytes_), static_cast<int64_t>(most())};
  }

  std::mutex& mutex() { return mutex_; }

 private:
  struct Kept {
    void* data;
    uint64_t age;
  };
  using ByCapacity = std::multimap<size_t, Kept>;
  /// What goes back to the system, when the lock that is taken after this is free again.
  struct Returned {
    std::vector<void*> blocks;
    ~Returned() {
      for (void* block : blocks) unmap(block);
    }
  };

  /// The smallest that is large enough and wastes no more than an eighth, of several the youngest; or null.
  void* take_kept(size_t capacity) {
    auto found = by_capacity_.lower_bound(capacity);
    if (found == by_capacity_.end() || found->first - capacity > capacity / 8) return nullptr;
    found = std::prev(by_capacity_.upper_bound(found->first));
    in_use_ += found->first;
    peak_ = std::max(peak_, in_use_);
    by_age_.erase(found->second.age);
    return forget(found);
  }

  void* forget(ByCapacity::iterator block) {
    void* const data = block->second.data;
    kept_bytes_ -= block->first;
    by_capacity_.erase(block);
    return data;
  }

  size_t most() const { return std::max({peak_, last_peak_, in_use_}); }

  void trim(std::vector<void*>& returned) {
    while (!by_age_.empty() && in_use_ + kept_bytes_ > most()) {
      returned.push_back(forget(by_age_.begin()->second));
      by_age_.erase(by_age_.begin());
    }
  }

  void return_all() {
    Returned returned;
    const std::lock_guard lock(mutex_);
    for (const auto& [capacity, kept] : by_capacity_) returned.blocks.push_back(kept.data);
    by_capacity_.clear();
    by_age_.clear();
    kept_bytes_ = 0;
  }

  std::mutex mutex_;  ///< guards what follows
  ByCapacity by_capacity_;
  std::map<uint64_t, ByCapacity::iterator> by_age_;  ///< the oldest first
  uint64_t next_age_ = 0;
  size_t in_use_ = 0, kept_bytes_ = 0, peak_ = 0, last_peak_ = 0;
};

LargeBlockCache& cache() {
  static LargeBlockCache& cache = *new LargeBlockCache;  // outlives every tensor
  return cache;
}

void free_block(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  if (const Header header = header_of(data); header.capacity == 0) {
    std::free(header.start);
  } else {
    cache().keep(data);
  }
}

/// Reading it may itself need memory that there is not.
std::optional<int64_t> available() {
  try {
    return available_to_process();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &free_block, cpu};
    // A negative number of bytes, as some callers have it, is more than there is.
    void* const data = bytes > PTRDIFF_MAX ? nullptr
                       : bytes < kLarge    ? small_block(bytes)
                                           : cache().take(bytes);
    if (data == nullptr) {
      note_allocation_failure(static_cast<int64_t>(std::min<size_t>(bytes, PTRDIFF_MAX)), available());
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "can't allocate memory: ", bytes, " bytes were asked for");
    }
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &free_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace

void install_cpu_allocator() {
  static const bool installed = [] {
    if (kSanitized) return false;
    // A process that is forked while another thread holds the mutex must be able to allocate.
    cache();
    ::pthread_atfork([] { cache().mutex().lock(); }, [] { cache().mutex().unlock(); },
                     [] { cache().mutex().unlock(); });
    c10::SetCPUAllocator(new CpuAllocator, /*priority=*/1);
    if (!text_variable("MALLOC_TRIM_THRESHOLD_")) ::mallopt(M_TRIM_THRESHOLD, kHeapEndKept);
    if (!text_variable("MALLOC_MMAP_THRESHOLD_")) ::mallopt(M_MMAP_THRESHOLD, kMappedByMalloc);
    return true;
  }();
  (void)installed;
}

LargeBlocks large_blocks() { return cache().bytes(); }

void cpu_allocator_step() { cache().begin_step(); }

}  // namespace tessera::comm
