#include "comm/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

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

/// In front of each block.
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

/// Thread-safe.
class LargeBlockCache {
 public:
  void* take(size_t bytes) {
    const size_t capacity = (bytes + kPage - 1) / kPage * kPage;
    std::vector<void*> returned;
    void* data = nullptr;
    {
      const std::lock_guard lock(mutex_);
      const auto found = find(capacity);
      data = found == kept_.end() ? nullptr : *found;
      if (data != nullptr) {
        kept_.erase(found);
        kept_bytes_ -= header_of(data).capacity;
      }
      in_use_ += data != nullptr ? header_of(data).capacity : capacity;
      peak_ = std::max(peak_, in_use_);
      trim(returned);
    }
    for (void* block : returned) unmap(block);
    if (data == nullptr && (data = map(capacity)) == nullptr) {
      return_all();
      data = map(capacity);
      const std::lock_guard lock(mutex_);
      if (data == nullptr) in_use_ -= capacity;
    }
    return data;
  }

  void keep(void* data) {
    const size_t capacity = header_of(data).capacity;
    std::vector<void*> returned;
    {
      const std::lock_guard lock(mutex_);
      in_use_ -= capacity;
      kept_.push_back(data);
      kept_bytes_ += capacity;
      trim(returned);
    }
    for (void* block : returned) unmap(block);
  }

  void begin_step() {
    std::vector<void*> returned;
    {
      const std::lock_guard lock(mutex_);
      last_peak_ = std::exchange(peak_, in_use_);
      trim(returned);
    }
    for (void* block : returned) unmap(block);
  }

  LargeBlocks bytes() {
    const std::lock_guard lock(mutex_);
    return {static_cast<int64_t>(in_use_), static_cast<int64_t>(kept_bytes_), static_cast<int64_t>(most())};
  }

  std::mutex& mutex() { return mutex_; }

 private:
  /// The smallest that is large enough and wastes no more than an eighth; of several the youngest.
  std::vector<void*>::iterator find(size_t capacity) {
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      const size_t size = header_of(*it).capacity;
      if (size >= capacity && size - capacity <= capacity / 8 &&
          (best == kept_.end() || size <= header_of(*best).capacity))
        best = it;
    }
    return best;
  }

  size_t most() const { return std::max(peak_, last_peak_); }

  void trim(std::vector<void*>& returned) {
    auto end = kept_.begin();
    for (; end != kept_.end() && in_use_ + kept_bytes_ > most(); ++end)
      kept_bytes_ -= header_of(*end).capacity;
    returned.assign(kept_.begin(), end);
    kept_.erase(kept_.begin(), end);
  }

  void return_all() {
    std::vector<void*> returned;
    {
      const std::lock_guard lock(mutex_);
      returned.swap(kept_);
      kept_bytes_ = 0;
    }
    for (void* block : returned) unmap(block);
  }

  std::mutex mutex_;         ///< guards what follows
  std::vector<void*> kept_;  ///< in the order of their freeing
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
    return true;
  }();
  (void)installed;
}

LargeBlocks large_blocks() { return cache().bytes(); }

void cpu_allocator_step() { cache().begin_step(); }

}  // namespace tessera::comm
