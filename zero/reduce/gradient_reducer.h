// GradientReducer: takes each parameter's gradient as autograd finishes it, and leaves the sum over ranks
// (and micro-steps) in the units' accumulators: the whole unit, or this rank's shard, as the placement says.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "zero/memory/host_thread.h"
#include "zero/plan/layout.h"
#include "zero/reduce/gradient_accumulator.h"
#include "zero/reduce/gradient_slots.h"
#include "zero/reduce/reduction_queue.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

struct ReducerOptions {
  at::ScalarType accumulate_dtype = at::kFloat;
  at::ScalarType communicate_dtype = at::kFloat;
  bool reduce_each_micro_step = false;  ///< also where gradients are not sharded
  bool overlap = true;                  ///< false: wait for each reduction where it is issued
  /// Units of the mean size that gradients may wait in. Where the transport buffers reductions (Gloo), as
  /// many are under way at once.
  int num_slots = 3;
  double predivide_factor = 1;  ///< DeepSpeed's gradient_predivide_factor
  bool prescale = false;        ///< DeepSpeed's prescale_gradients: divide by the world size before summing
  /// The ranks that hold the same shards, where there are several rows of ranks (mesh.h): the accumulators
  /// are summed over them at the accumulation boundary.
  comm::CommunicatorPtr replicas = nullptr;
  /// Where the host's memory is not the device's, and gradients lie there or pass through it: see [Note:
  /// state on the host] in param_unit.h.
  HostTransfer* transfer = nullptr;
  HostThread* host = nullptr;
  /// Bytes of gradients that are taken from p.grad together: see [Note: gradients wait for each other] in
  /// gradient_accumulator.h. Unset: as the device of the units has it.
  std::optional<int64_t> max_waiting_bytes = {};
  /// How long a hook waits for a reduction, where it must not wait for ever: see [Note: hooks wait with a
  /// limit].
  std::chrono::milliseconds hook_wait_limit = std::chrono::seconds(1);
  Logger log;
};

/// Used by one thread at a time: autograd's in hooks, and the one that calls backward(). `parameters[i]` is
/// Layout parameter i. `comm`: of the ranks that hold the shards of a unit. Layout and units must outlive it.
class GradientReducer {
 public:
  GradientReducer(const Layout& layout, std::vector<ParamUnit>& units, std::vector<at::Tensor> parameters,
                  comm::CommunicatorPtr comm, const ReducerOptions& options);
  ~GradientReducer();

  /// `first`: the accumulators start anew. `boundary`: the last micro-step before an update.
  void begin_backward(bool first, bool boundary);
  /// Collective. Issues and waits for whatever is left. Throws CommError.
  void finish_backward();

  /// Collective. In place of finish_backward() for a backward that will not be finished: issues and waits for
  /// what is left of it, which the other ranks may be waiting for. Throws CommError.
  void drop_backward();
  /// Drops all gradients; the next backward starts anew. Not in a backward.
  void drop();
  bool at_boundary() const { return boundary_; }

  /// Units that received gradients after their reduction had been issued (a parameter used again by
  /// re-entrant recomputation), one flag each. Ranks agree on them and then all call reduce_late with the
  /// same units.
  std::vector<bool> late_units() const;
  /// Collective.
  void reduce_late(const std::vector<int>& units);

  /// (shard numel) accumulate dtype: this rank's part of the reduced sum. Valid after a boundary's
  /// finish_backward, until the next begin_backward. May be on disk: see InMemory.
  at::Tensor shard(const ParamUnit& unit) const;
  /// (piece numel) the part of shard() that this rank alone answers for.
  at::Tensor piece(const ParamUnit& unit) const;
  /// (units, 2) fp64 on the device, after a boundary's finish_backward: of each trainable unit's
  /// piece() the sum of squares of the finite elements, and the number of the others. Does not wait for the
  /// device.
  at::Tensor norms() const;
  /// Whether a gradient came for the parameter on this rank since the accumulators started anew.
  const std::vector<bool>& used() const { return gradients_.used(); }

  /// Sums are left where they are.
  /// At stage 0 every rank needs the whole sum, to be read once, by the update. Where ranks see each other's
  /// memory each sums its slice, and the others read it there: reduced() instead of an all-gather.
  /// done_reading() then says when all have read.
  bool reads_peers() const { return reads_peers_; }
  /// The reduced sum of `range` (in the unit's elements, within one rank's shard); as shard()
  /// otherwise.
  at::Tensor reduced(const ParamUnit& unit, Range range) const;
  /// Collective, does not wait. This rank has read what it wanted of reduced().
  void done_reading();

  // Where the reductions' order is not this class's alone: see [Note: one order on a device] in residency.h.
  bool under_way() const { return gradients_.in_backward(); }
  /// Of the backward under way: reductions that could be issued, in the agreed order (in the
  /// first backward: units complete so far), and those that have been.
  int num_ready() const;
  int num_issued() const { return under_way() ? queue_->num_issued() : 0; }
  /// Collective. Issues reductions until `count` have been, with zeros for gradients that have not come.
  /// Does nothing outside of backward.
  void issue_until(int count);
  /// Whether hooks are to issue nothing, because issue_until() does.
  std::function<bool()> issued_from_outside;

  int64_t slot_bytes() const { return slots_ ? slots_->bytes() : 0; }
  const std::vector<int>& order() const { return queue_->order(); }
  at::ScalarType accumulate_dtype() const { return options_.accumulate_dtype; }
  /// False for some passes once a hook's wait has reached its limit.
  bool waits_in_hooks() const { return queue_->waits_in_hooks(); }
  /// Called at the start of every hook: failures kept elsewhere surface here, inside backward.
  std::function<void()> check;
  /// Called before finish_backward waits for other ranks: whatever they may be waiting for has to be issued
  /// first.
  std::function<void()> before_waiting;

 private:
  /// How gradients come to their sum, chosen at construction.
  enum class ReductionMode {
    kAccumulateInPlace,   ///< micro-steps add up in the whole unit's accumulator, which is reduced in place
    kAccumulateThenCopy,  ///< the same, reduced through a slot of another dtype
    kReduceEachBackward,  ///< every micro-step goes through a slot; the reduced sum is added to the
                          ///< accumulator
    kSingleRank,          ///< the same of one rank: see [Note: nothing to sum] in gradient_accumulator.h
  };
  using Wait = ReductionQueue::Wait;

  void on_gradient(int parameter);
  bool each_backward() const {
    return mode_ == ReductionMode::kReduceEachBackward || mode_ == ReductionMode::kSingleRank;
  }
  bool reducing() const { return each_backward() || boundary_; }
  bool through_slots() const {
    return mode_ == ReductionMode::kAccumulateThenCopy || mode_ == ReductionMode::kReduceEachBackward;
  }
  bool late(int parameter) const;
  bool claim_slot(ParamUnit& unit, Wait wait);
  at::Tensor slot_of(const ParamUnit& unit) const;
  void issue_ready(bool at_end);
  bool issue_next(Wait wait);
  bool has_room(Wait wait);
  at::Tensor prepare_buffer(ParamUnit& unit);
  void bring_accumulator(ParamUnit& unit, bool add);
  at::Tensor sum_goes_to(ParamUnit& unit, bool add);
  at::Tensor sum_on_device(const ParamUnit& unit) const;
  void issue(ParamUnit& unit);
  bool complete_next(Wait wait);
  void free_slot(ParamUnit& unit);
  void leave_memory(ParamUnit& unit);
  void complete_all();
  void gather_results();
  void issue_sums(bool at_end);
  void sum_over_replicas();
  void make_accumulator(ParamUnit& unit);
  ReductionMode choose_mode() const;
  at::Tensor zero_norms() const;
  void make_slots();
  void install_hooks();
  std::vector<int64_t> numels_in_order() const;
  void agree_on_order();

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  comm::CommunicatorPtr comm_;
  ReducerOptions options_;
  double prescale_, postscale_;
  double row_scale_;  // of a row's sum: postscale_, unless the sum over rows is what is scaled
  const ReductionMode mode_;
  bool update_whole_ = false;  // every rank updates whole units, and needs the whole sum
  GradientAccumulator gradients_;
  bool reads_peers_ = false;
  comm::WorkPtr all_have_read_;

  std::unique_ptr<ReductionQueue> queue_;
  std::optional<GradientSlots> slots_;
  std::optional<StagingPool> on_device_;  // where accumulators are on the host
  at::Tensor norms_;                      // where they leave the device or the memory: taken before they do
  std::vector<int> finished_;             // the first backward's order of completion
  bool order_agreed_ = false;
  // Over the replicas, of this boundary's backward, in that order: sums of pieces, and gathers of those,
  // which have a group of their own where that lets them begin before all sums have.
  std::vector<comm::WorkPtr> sums_, sum_gathers_;
  comm::CommunicatorPtr sum_gather_comm_;

  bool boundary_ = true;
};

}  // namespace tessera::zero
