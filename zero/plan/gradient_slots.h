// The memory that gradients are reduced from.
//
// [Note: a ring of slots]
// A unit's gradients go into its slot when its turn to be reduced has come. All slots lie one after another
// in one buffer, round and round in the agreed order of reductions. A slot is free once the units that had
// the same memory before, all of them earlier in the order, have been reduced; so the unit whose turn it is
// always gets its slot, and nothing can run dry. The buffer has room for a few units of the mean size, and
// for the largest one. Where communication is slower than backward, a hook waits for that reduction: this is
// what bounds the memory of gradients. The gradients of a unit that has all of them wait outside of slots
// only while its turn cannot come, because a unit before it still lacks gradients on this rank (an order of
// use that differs from the agreed one), or while hooks do not wait ([Note: hooks wait with a limit] in
// gradient_reducer.h).
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::zero {

/// Where a unit's gradients are reduced from, in elements of the buffer.
struct GradientSlot {
  int64_t offset = 0, numel = 0;
  /// The last place before this one in the order of reductions whose slot overlaps this one; -1: none.
  int last_overlapping = -1;
};

/// Elements of a buffer with room for `num_slots` units of the mean size of `numels` and for the largest.
int64_t gradient_buffer_numel(const std::vector<int64_t>& numels, int num_slots);

/// The slots of units of `numels`, by place in the order of reductions, in a buffer of `buffer_numel`
/// elements, which has room for the largest.
std::vector<GradientSlot> arrange_slots(const std::vector<int64_t>& numels, int64_t buffer_numel);

}  // namespace tessera::zero
