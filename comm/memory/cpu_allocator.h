// Memory of CPU tensors. libtorch's own allocator asks glibc, and that costs twice: glibc returns large
// blocks and maps them again, a page fault per 4 KiB, or, with other settings, keeps them in a heap that
// fragments where tensors of many sizes come and go; and before glibc 2.38 an aligned block that was freed is
// seldom found again. [Note: large blocks] in cpu_allocator.cc says what this one does instead.
#pragma once

#include <cstdint>

namespace tessera::comm {

/// From now on this process's CPU tensors have memory of ours; those that there are keep theirs.
/// Allocations that fail are noted (core/memory/allocation_failure.h). The first call has this effect, and
/// later calls do nothing. It does nothing in builds with a sanitizer, which checks libtorch's own blocks,
/// and where another allocator was set with a higher priority (c10::SetCPUAllocator).
void install_cpu_allocator();

/// Counts bytes of blocks of a megabyte and more.
struct LargeBlocks {
  int64_t in_use = 0;
  int64_t kept = 0;       ///< freed, and kept for the next of about their size
  int64_t most_used = 0;  ///< what in_use + kept never exceeds, unless in_use alone does
};
/// Thread-safe.
LargeBlocks large_blocks();

/// A step of training begins: what was in use at once before the last step no longer counts as the
/// most. Thread-safe.
void cpu_allocator_step();

}  // namespace tessera::comm
