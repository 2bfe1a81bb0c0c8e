// GradientReducer: takes each parameter's gradient as autograd finishes it, and leaves the sum over ranks
// (and micro-steps) in the units' accumulators: the whole unit, or this rank's shard, as the placement says.
//
// A unit's gradients stay in p.grad until it has all of them, as in FSDP2's foreach_reduce. Then they are
// taken, and go together into the unit's accumulator, or into the slot that it is reduced from ([Note: a ring
// of slots] in gradient_slots.h). The unit's reduction is issued when its turn has come in the order that
// ReductionOrder keeps, and its sum goes to the accumulator.
//
// [Note: hooks wait with a limit]
// Where parameters are sharded, a hook that waits for a reduction could wait for ever: the other rank may
// lack a gradient, which only the end of its backward declares missing, and before that wait in a gather
// that this rank has not issued yet. That takes ranks which use different parameters. So such a wait has
// a limit. Once it is reached, hooks don't wait for the next 8 passes (then 16, 32 …), gradients wait
// outside of slots, and a warning says so: the results are the same, the memory of gradients is not bounded
// in those passes. The agreed order of a device ([Note: one order on a device] in collective_order.h) needs
// no limit, because each rank issues reductions at recorded places, with zeros for what it lacks, and reduces
// what comes later on its own. That second sum has another order of addition: ranks that use different
// parameters would then get other bits at stage 3 than at stages 0 to 2. Where waits block, one sum in rank
// order is kept, and with it the limit. A wait that only orders streams (CUDA) holds up no thread, and needs
// none of this.
//
// Re-entrant recomputation gives a parameter its gradient in parts, a hook each, and autograd adds them up in
// p.grad. How many there are the first backward shows. A part beyond those expected finds the gradients
// taken: it is late, and reduced on its own. This depends on counts alone, so all stages round alike.
//
// [Note: nothing to sum]
// Where a unit's ranks are one rank, a slot would only be copied into the accumulator. There the accumulator
// is the slot: gradients go into it, rounded as they would be in a slot of communicate_dtype, and are added
// where a micro-step before has left something. So the bits are those of the way through a slot, in one pass
// over memory instead of two, and there are no slots.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "comm/memory/host_thread.h"
#include "core/log.h"
#include "zero/gather/residency.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/stream_order.h"
#include "zero/plan/layout.h"
#include "zero/plan/reduction_order.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

struct ReducerOptions {
  at::ScalarType accumulate_dtype = at::kFloat;
  at::ScalarType communicate_dtype = at::kFloat;
  bool reduce_each_micro_step = false;  ///< also where gradients are not sharded
  bool overlap = true;                  ///< false: wait for each reduction where it is issued
  /// Units of the mean size that slots have room for. Where the transport buffers reductions (Gloo), as
  /// many are under way at once.
  int num_slots = 3;
  double predivide_factor = 1;  ///< DeepSpeed's gradient_predivide_factor
  bool prescale = false;        ///< DeepSpeed's prescale_gradients: divide by the world size before summing
  bool sum = false;             ///< over the ranks, not their mean; the two above are of no effect then
  /// The ranks that hold the same shards, where there are several replicas (mesh.h): the accumulators
  /// are summed over them at the accumulation boundary.
  comm::CommunicatorPtr replicas = nullptr;
  /// Where the host's memory is not the device's, and gradients lie there or pass through it: see [Note:
  /// state on the host] in param_unit.h.
  comm::HostTransfer* transfer = nullptr;
  comm::HostThread* host = nullptr;
  /// How long a hook waits for a reduction, where it must not wait for ever: see [Note: hooks wait with a
  /// limit].
  std::chrono::milliseconds hook_wait_limit = std::chrono::seconds(1);
  /// Is called when a gradient comes outside of a backward, and may call begin_backward(). If it does not,
  /// the gradient stays in p.grad. Unset: nothing.
  std::function<void()> on_gradient_outside;
  Logger log;
};

/// The trainable units in the reverse of registration: the order of reductions until the first backward has
/// shown a better one.
std::vector<int> first_order_of_reductions(const std::vector<ParamUnit>& units);

/// Accumulates and reduces the gradients of one rank's units. Owns the hooks on the parameters, the buffer of
/// slots, and what it keeps of each gradient (UnitGradient, by unit, lies in the unit). Used by one thread at
/// a time: autograd's in hooks, and the one that calls backward(). `parameters[i]` is Layout parameter i.
/// `comm` joins the ranks that hold the shards of a unit. `residency` is asked for failures and for the
/// order, and is told nothing; null: no unit is ever gathered. Requires: layout, units, order and residency
/// outlive it.
class GradientReducer {
 public:
  GradientReducer(const Layout& layout, std::vector<ParamUnit>& units, std::vector<at::Tensor> parameters,
                  ReductionOrder& order, Residency* residency, comm::CommunicatorPtr comm,
                  const ReducerOptions& options);
  ~GradientReducer();

  /// Installs the hooks that are missing: what Python's register_post_accumulate_grad_hook() sets on a
  /// parameter that has had none takes the place of our hook. Ours runs after it from then on.
  void install_hooks();
  /// `first`: the accumulators start anew. `boundary`: the last micro-step before an update. `factor`: each
  /// gradient is multiplied by it.
  void begin_backward(bool first, bool boundary, double factor = 1);
  /// Collective. Issues and waits for whatever is left. Throws CommError. Before it
  /// Residency::finish_gathers(), because another rank may be waiting for a gather.
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
  /// (owned numel) the part of shard() that this rank alone answers for.
  at::Tensor owned(const ParamUnit& unit) const;
  /// Collective. The mean over the ranks so far, outside of a backward and also before the boundary, in fp32
  /// or the accumulate dtype, for gather_owned(): (numel), or this rank's (owned numel). The accumulator has
  /// to be in memory.
  at::Tensor mean_so_far(ParamUnit& unit);
  /// The same after a boundary's finish_backward, without late parts; not Collective.
  at::Tensor mean_at_boundary(const ParamUnit& unit) const;
  /// Collective. Writes the parameter's part of the reduced gradient, after a boundary's finish_backward:
  /// `value`, its shape, the same on all ranks.
  void set(int parameter, const at::Tensor& value);
  /// (units, 2) fp64 on the device, after a boundary's finish_backward: of each trainable unit's
  /// owned() the sum of squares of the finite elements, and the number of the others. Does not wait for the
  /// device.
  at::Tensor norms() const;
  /// Whether a gradient came for the parameter on this rank since the accumulators started anew.
  std::vector<bool> used() const;

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

  /// Collective. Issues reductions until `count` have been, with zeros for gradients that have not come.
  /// Does nothing outside of backward.
  void issue_until(int count);

  int64_t slot_bytes() const { return slots_.defined() ? static_cast<int64_t>(slots_.nbytes()) : 0; }
  at::ScalarType accumulate_dtype() const { return options_.accumulate_dtype; }
  /// False for some passes once a hook's wait has reached its limit.
  bool waits_in_hooks() const { return passes_without_waits_ == 0; }

 private:
  enum class Wait {
    kNo,       ///< takes only what has arrived
    kLimited,  ///< see [Note: hooks wait with a limit]
    kUntilDone,
  };
  /// What is kept of a parameter's gradient.
  struct ParameterGradient {
    at::Tensor parameter;
    int came = 0;                 ///< gradients in this backward
    int expected = 1;             ///< in each backward, as the first one has shown
    bool used = false;            ///< one came on this rank since the accumulators started anew
    at::Tensor taken = {};        ///< (numel) out of p.grad, and not copied in yet; undefined: nothing
    bool in_accumulator = false;  ///< something was copied into it since it started anew
  };

  // made at construction
  ReductionMode choose_mode() const;
  void make_accumulator(ParamUnit& unit);
  void make_slots();
  void arrange();
  bool each_backward() const {
    return mode_ == ReductionMode::kReduceEachBackward || mode_ == ReductionMode::kSingleRank;
  }
  bool reducing() const { return each_backward() || boundary_; }
  bool through_slots() const { return zero::through_slots(mode_); }

  // a gradient that has come
  void on_gradient(int parameter);
  ParamUnit& unit_of(int parameter) const { return units_[layout_.slice(parameter).unit]; }
  void complete(ParamUnit& unit);

  // from p.grad to the unit
  void take(ParamUnit& unit);
  at::Tensor take_grad(ParameterGradient& gradient);
  at::Tensor rounded_as_in_slot(const at::Tensor& grad) const;
  void fill_slot(const ParamUnit& unit, const at::Tensor& slot);
  void accumulate(const ParamUnit& unit);
  at::Tensor give_out(int parameter);
  void complete_accumulator(ParamUnit& unit);
  template <class Keeps>
  void zero_all_but(const at::Tensor& flat, const ParamUnit& unit, const Keeps& keeps) const;
  at::Tensor part_of(const at::Tensor& flat, int parameter) const;

  // slots
  bool wait_for_slot(const ParamUnit& unit, Wait wait);
  at::Tensor slot_of(const ParamUnit& unit) const;

  // reductions
  void issue_ready(bool at_end);
  bool issue_next(Wait wait);
  bool has_room(Wait wait);
  at::Tensor prepare_buffer(ParamUnit& unit);
  void bring_accumulator(ParamUnit& unit, bool add);
  at::Tensor sum_goes_to(ParamUnit& unit, bool add);
  at::Tensor sum_on_device(const ParamUnit& unit) const;
  void issue(ParamUnit& unit);
  Wait in_hook() const;
  bool complete_next(Wait wait);
  bool arrives_within_limit(const ParamUnit& unit);
  void leave_memory(ParamUnit& unit);
  bool late_on_some_rank(const ParamUnit& unit);
  void complete_all();
  void gather_results();
  void issue_sums(bool at_end);
  void sum_over_replicas();
  void agree_on_order();
  at::Tensor zero_norms() const;

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  ReductionOrder& order_;
  Residency* const residency_;
  comm::CommunicatorPtr comm_;
  ReducerOptions options_;
  double prescale_, postscale_;
  double shard_group_scale_;  // of a shard group's sum: postscale_, unless the sum over replicas is scaled
  const ReductionMode mode_;
  const bool single_rank_;       // see [Note: nothing to sum]
  bool update_whole_ = false;    // every rank updates whole units, and needs the whole sum
  bool hooks_may_block_ = true;  // false: a rank that waits in a hook may keep others from getting there
  bool reads_peers_ = false;
  comm::WorkPtr all_have_read_;

  bool first_ = true;     // of the backward under way, or the last one: the accumulators started anew with it
  bool boundary_ = true;  // an update follows
  double factor_ = 1;     // of the gradients of the backward under way, or the last one
  std::vector<ParameterGradient> gradients_;  // by parameter
  at::Tensor slots_;                          // see [Note: a ring of slots]; undefined while there are none
  std::optional<BufferPool> on_device_;       // where accumulators are on the host
  at::Tensor norms_;  // where they leave the device or the memory: taken before they do
  StreamOrder streams_;

  // See [Note: hooks wait with a limit].
  int passes_without_waits_ = 0;  // this backward and those after it
  int next_passes_without_waits_;

  // These are the collectives over the replicas of this boundary's backward, in that order: sums of owned
  // parts, and gathers of those, which have a group of their own where that lets them begin before all sums
  // have begun.
  std::vector<comm::WorkPtr> sums_, sum_gathers_;
  comm::CommunicatorPtr sum_gather_comm_;
};

}  // namespace tessera::zero
