// AllocationFailure: the allocation for which there was no memory, as the allocator saw it. Errors of
// libtorch's allocators say how much was asked for, and no more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/memory/memory_use.h"

namespace tessera {

struct AllocationFailure {
  int64_t bytes = 0;                 ///< asked for; of CUDA what the allocator would have reserved
  std::optional<int64_t> available;  ///< what was free for it: of the device, or of this process
  std::optional<int64_t> total;      ///< of the device, where that is not the host
  std::optional<MemoryUse> use;      ///< of the innermost MemoryFor; unset: outside of all
  std::string unit;                  ///< of the innermost MemoryForUnit; empty: outside of all
};

/// Says for which unit this thread allocates during its lifetime. The innermost scope counts.
class MemoryForUnit {
 public:
  /// `description`: "unit 3 (a.weight … b.weight)". Referred to until the end.
  explicit MemoryForUnit(const std::string& description);
  ~MemoryForUnit();
  MemoryForUnit(const MemoryForUnit&) = delete;
  MemoryForUnit& operator=(const MemoryForUnit&) = delete;

  /// The description of this thread's innermost scope; null outside of all.
  static const std::string* current();

 private:
  const std::string* outer_;
};

/// Must be called by an allocator that has no memory, on the thread that asks for it. A failure outside of
/// all MemoryForUnit scopes does not replace one inside: the engine does not go on after a failure of its
/// own, and later ones follow from it. Thread-safe.
void note_allocation_failure(int64_t bytes, std::optional<int64_t> available,
                             std::optional<int64_t> total = std::nullopt) noexcept;

/// The failure that was noted on this thread, or else on any other (autograd's, of a device), of which
/// one inside a MemoryForUnit scope comes first; unset: none since the last call, which forgets it.
/// Thread-safe.
std::optional<AllocationFailure> take_allocation_failure();

}  // namespace tessera
