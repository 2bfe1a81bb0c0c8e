#include "core/memory/allocation_failure.h"

#include <exception>
#include <mutex>
#include <utility>

namespace tessera {
namespace {

// Allocators have no parameter for it, so it is thread-local.
thread_local const std::string* current_unit = nullptr;
thread_local std::optional<AllocationFailure> failure_here;

/// The last failure of all threads: autograd computes the backward of a device on a thread of its own.
struct LastFailure {
  std::mutex mutex;
  std::optional<AllocationFailure> failure;  ///< guarded by mutex
};

LastFailure& last_failure() {
  static LastFailure& last = *new LastFailure;  // outlives every tensor
  return last;
}

}  // namespace

MemoryForUnit::MemoryForUnit(const std::string& description)
    : outer_(std::exchange(current_unit, &description)) {}
MemoryForUnit::~MemoryForUnit() { current_unit = outer_; }
const std::string* MemoryForUnit::current() { return current_unit; }

void note_allocation_failure(int64_t bytes, std::optional<int64_t> available,
                             std::optional<int64_t> total) noexcept {
  try {
    const AllocationFailure failure{.bytes = bytes,
                                    .available = available,
                                    .total = total,
                                    .use = MemoryFor::current(),
                                    .unit = current_unit == nullptr ? "" : *current_unit};
    const auto note = [&](std::optional<AllocationFailure>& noted) {
      if (!noted || noted->unit.empty() || !failure.unit.empty()) noted = failure;
    };
    note(failure_here);
    const std::lock_guard lock(last_failure().mutex);
    note(last_failure().failure);
  } catch (const std::exception&) {
    // If there is no memory for the note, the failure is reported with less detail.
  }
}

std::optional<AllocationFailure> take_allocation_failure() {
  const std::lock_guard lock(last_failure().mutex);
  std::optional<AllocationFailure> other = std::exchange(last_failure().failure, std::nullopt);
  std::optional<AllocationFailure> mine = std::exchange(failure_here, std::nullopt);
  const bool of_the_engine = other && !other->unit.empty();
  return mine && (!mine->unit.empty() || !of_the_engine) ? mine : other;
}

}  // namespace tessera
