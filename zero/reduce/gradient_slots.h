// GradientSlots: the memory that gradients wait in for their reduction.
//
// [Note: a ring of slots]
// A unit's gradients wait in its slot, and all slots lie one after another in one buffer, round and round in
// the agreed order of reductions. A slot is free once the units that had the same memory before, all of them
// earlier in the order, have been reduced; so the unit whose turn it is always gets its slot, and nothing can
// run dry. The buffer has room for a few units of the mean size, and for the largest one. Where communication
// is slower than backward, a hook waits for that reduction: this is what bounds the memory of gradients. A
// gradient stays in `p.grad` only while its unit's turn cannot come, because a unit before it still lacks
// gradients on this rank (an order of use that differs from the agreed one), or while hooks do not wait
// ([Note: hooks wait with a limit] in reduction_queue.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace tessera::zero {

/// Not thread-safe. Owns the buffer.
class GradientSlots {
 public:
  /// Collective. Room for `num_slots` units of the mean size of `numels` (by place in the order) and for the
  /// largest, in memory that other ranks can read where there is such (Communicator::allocate_symmetric).
  /// `like`: dtype and device.
  GradientSlots(comm::Communicator& comm, const std::vector<int64_t>& numels, int num_slots,
                const at::TensorOptions& like);

  /// Elements of the buffer.
  static int64_t total_numel(const std::vector<int64_t>& numels, int num_slots);

  /// The order has changed: `numels` by place in the new one. No slot may be in use.
  void arrange(const std::vector<int64_t>& numels);
  /// (numel of the unit at `place`) its slot.
  at::Tensor view(int place) const { return buffer_.narrow(0, slots_[place].offset, slots_[place].numel); }
  /// The last place before this one whose slot overlaps this one's; -1: none.
  int last_overlapping(int place) const { return slots_[place].last_overlapping; }
  int64_t bytes() const { return static_cast<int64_t>(buffer_.nbytes()); }

 private:
  struct Slot {
    int64_t offset, numel;  // elements
    int last_overlapping;
  };
  at::Tensor buffer_;
  std::vector<Slot> slots_;  // by place
};

/// Collective. (numel) zeros in memory that the other ranks can read, where there is such memory.
at::Tensor symmetric_zeros(comm::Communicator& comm, int64_t numel, const at::TensorOptions& like,
                           const std::string& label);

}  // namespace tessera::zero
