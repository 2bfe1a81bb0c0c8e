// FailingAllocations: from some allocation on there is no memory for CPU tensors of this thread.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "tests/support/listening_allocator.h"

namespace tessera::testing {

/// While it lives, this thread's allocations are counted from 0, and those from `first` on throw
/// c10::OutOfMemoryError.
class FailingAllocations {
 public:
  explicit FailingAllocations(int64_t first) : first_(first) {
    ListeningAllocator<FailingAllocations>::install();
    current() = this;
  }
  ~FailingAllocations() { current() = nullptr; }
  FailingAllocations(const FailingAllocations&) = delete;

  int64_t count() const { return count_; }

 private:
  friend ListeningAllocator<FailingAllocations>;
  static void wants(int64_t bytes) {
    FailingAllocations* const self = current();
    if (self != nullptr && self->count_++ >= self->first_)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "can't allocate memory: you tried to allocate ", bytes,
                       " bytes");
  }
  static void took(void* /*data*/, int64_t /*bytes*/) {}
  static void gives_back(void* /*data*/) {}
  /// This thread's.
  static FailingAllocations*& current() {
    static thread_local FailingAllocations* current = nullptr;
    return current;
  }

  const int64_t first_;
  int64_t count_ = 0;
};

}  // namespace tessera::testing
