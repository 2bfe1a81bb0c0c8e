// GradientReducer: takes each parameter's gradient as autograd finishes it, and leaves
// the sum over ranks (and micro-steps) in flat accumulators: a whole unit at stages 0 and
// 1, this rank's shard at stages 2 and 3.
//
// [Note: one order of reductions]
// Reductions are collectives, but gradients finish in an order that may differ between ranks (unused
// parameters, branches). So units are reduced in one agreed order: at first the reverse of registration, then
// the order in which rank 0's first backward completed them. A unit is issued when it and all units before it
// are complete; whatever is left is issued at the end of backward, with zeros for gradients that never came.
//
// [Note: a ring of slots]
// Gradients wait for their reduction in slots, one a unit, which lie one after another in one buffer, round
// and round in the agreed order. A slot is free once the units that had the same memory before, all of them
// earlier in the order, have been reduced; so the unit whose turn it is always gets its slot, and nothing can
// run dry. The buffer has room for a few units of the mean size, and for the largest one. Where communication
// is slower than backward, a hook waits for that reduction: this is what bounds the memory of gradients. A
// gradient stays in `p.grad` only while its unit's turn cannot come, because a unit before it still lacks
// gradients on this rank (an order of use that differs from the agreed one).
//
// [Note: patience]
// With sharded parameters that wait could last for ever: the other rank may lack a gradient that only the end
// of its backward will declare missing, and on the way there stand in a gather that this rank has not come
// to. That takes ranks which use different parameters. So such a wait has a limit. Once it is reached, hooks
// don't wait for the next 8 passes (then 16, 32 …: a model that is so by nature loses a few seconds in all),
// gradients stay in `p.grad`, and a warning says so: the results are the same, the memory of gradients is not
// bounded in those passes. A wait that only orders streams (CUDA) holds up no thread, and needs none of this:
// how far the device is behind says nothing about the other ranks.
//
// [Note: gradients in parts]
// Re-entrant recomputation gives a parameter its gradient in parts, a hook each. Where slots round (another
// dtype than the accumulators', or a scale before the sum) the parts are added up in the accumulators' dtype
// first, as stages 0 and 1 do, and the sum goes into the slot once: so all stages round alike. How many parts
// there are the first backward shows; a part beyond those expected is late at every stage, and reduced on its
// own. A parameter with one part needs no memory for that.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "zero/layout.h"
#include "zero/stage.h"

namespace tessera::zero {

struct ReducerOptions {
  Sharding sharding;
  at::ScalarType accumulate_dtype = at::kFloat;
  at::ScalarType communicate_dtype = at::kFloat;
  bool reduce_each_micro_step = false;  ///< at stages 0 and 1 too
  bool overlap = true;                  ///< false: wait for each reduction where it is issued
  /// Units of the mean size that gradients may wait in. Where the transport buffers reductions
  /// (Gloo), as many are under way at once.
  int num_slots = 3;
  double predivide_factor = 1;  ///< DeepSpeed's gradient_predivide_factor
  bool prescale = false;        ///< DeepSpeed's prescale_gradients: divide by the world size before summing
  std::chrono::milliseconds patience = std::chrono::seconds(1);  ///< see [Note: patience]
  Logger log;
};

/// Used by the thread that runs backward. `parameters[i]` is Layout parameter i.
class GradientReducer {
 public:
  GradientReducer(const Layout& layout, std::vector<at::Tensor> parameters, comm::CommunicatorPtr comm,
                  const ReducerOptions& options);
  ~GradientReducer();

  /// Local. `first`: the accumulators start anew. `boundary`: the last micro-step before an update.
  void begin_backward(bool first, bool boundary);
  /// Collective. Issues and waits for whatever is left. Throws CommError.
  void finish_backward();

  /// Local. Units that received gradients after their reduction had been issued (a parameter
  /// used again by re-entrant recomputation), one flag each. Ranks agree on them and then all
  /// call reduce_late with the same units.
  std::vector<bool> late_units() const;
  /// Collective.
  void reduce_late(const std::vector<int>& units);

  /// (shard_numel) accumulate dtype: this rank's part of the reduced sum. Valid after a boundary's
  /// finish_backward, until the next begin_backward.
  at::Tensor shard(int unit) const;
  /// What is accumulated here: (unit numel) at stages 0 and 1, (shard_numel) at 2 and 3. At stage 0 it is the
  /// whole sum after a boundary, unless reads_peers().
  const at::Tensor& accumulator(int unit) const { return units_[unit].accumulator; }
  /// Whether a gradient came for the parameter on this rank since the accumulators started anew.
  const std::vector<bool>& used() const { return used_; }

  /// [Note: sums are left where they are]
  /// At stage 0 every rank needs the whole sum, to be read once, by the update. Where ranks see each other's
  /// memory each sums its slice, and the others read it there: reduced() instead of an all-gather.
  /// done_reading() then says when all have read.
  bool reads_peers() const { return reads_peers_; }
  /// Local. The reduced sum of `range` (in the unit's elements, within one
  /// rank's shard); as shard() otherwise.
  at::Tensor reduced(int unit, Range range) const;
  /// Collective, does not wait. This rank has read what it wanted of reduced().
  void done_reading();

  // Where the reductions' order is not this class's alone: see [Note: one order on a device] in residency.h.
  bool under_way() const { return in_backward_; }
  /// Local. Of the backward under way: reductions that could be issued, in the agreed order (before there is
  /// one: in the order that will be), and those that have been.
  int num_ready() const;
  int num_issued() const { return in_backward_ ? next_issue_ : 0; }
  /// Collective. Issues reductions until `count` have been, with zeros for gradients that have
  /// not come. Outside of backward nothing.
  void issue_until(int count);
  /// Whether hooks are to issue nothing, because issue_until() does.
  std::function<bool()> issued_from_outside;

  int64_t accumulator_bytes() const;
  int64_t slot_bytes() const;
  const std::vector<int>& order() const { return order_; }
  int max_slots_in_use() const { return max_slots_in_use_; }
  /// False for some passes once a wait has lasted longer than the patience.
  bool waits_in_hooks() const { return impatient_passes_ == 0; }
  /// Called at the start of every hook: failures kept elsewhere surface here, inside backward.
  std::function<void()> check;
  /// Called before finish_backward waits for other ranks: whatever they may be
  /// waiting for has to be issued first.
  std::function<void()> before_waiting;

 private:
  class Hook;
  struct UnitState {
    at::Tensor accumulator;
    int place = 0;            // in order_
    int64_t slot_offset = 0;  // in slots_
    int after = -1;           // the last place before this one whose slot overlaps this one's
    int num_missing = 0;      // parameters that have not fired as often as expected
    bool in_slot = false;
    bool late = false;
  };

  enum class Wait { kNo, kPatiently, kUntilDone };

  void on_gradient(int parameter);
  Wait in_hook() const;
  bool reducing() const {
    return options_.sharding.gradients || options_.reduce_each_micro_step || boundary_;
  }
  bool sums_locally() const { return !options_.sharding.gradients && !options_.reduce_each_micro_step; }
  bool through_slots() const;
  bool whole_in_place() const { return !options_.sharding.optimizer && !through_slots(); }
  bool late(int parameter) const;

  void accumulate_locally(int parameter);
  void take_part(int parameter);
  bool claim_slot(int unit, Wait wait);
  void stage(int parameter);
  void stage_rest(int unit);
  bool has_grad(int parameter) const;
  void issue_ready(bool at_end);
  bool issue_next(Wait wait);
  bool has_room(Wait wait);
  void free_slot(int unit);
  void issue(int unit);
  bool complete_next(Wait wait);
  void complete_what_has_arrived();
  void gather_results();
  void make_slots();
  void place_slots();
  bool patiently(comm::Work& work);
  void zero_what_never_came(const at::Tensor& flat, int unit, const std::vector<bool>& came);
  void agree_on_order();
  at::Tensor slot_view(int unit);
  at::Tensor take_grad(int parameter);

  const Layout& layout_;
  std::vector<at::Tensor> parameters_;
  comm::CommunicatorPtr comm_;
  ReducerOptions options_;
  double prescale_ = 1, postscale_ = 1;
  bool slots_round_ = false;  // see [Note: gradients in parts]
  bool reads_peers_ = false;
  comm::WorkPtr all_have_read_;

  std::vector<UnitState> units_;
  at::Tensor slots_;                  // communicate dtype
  std::vector<comm::WorkPtr> works_;  // by unit, in flight
  std::vector<int> order_;            // trainable units
  std::vector<int> finished_;         // the first backward's order of completion
  bool order_agreed_ = false;
  int next_issue_ = 0;     // place in order_
  int next_complete_ = 0;  // place in order_: reductions before it have been taken

  bool first_ = true, boundary_ = true, in_backward_ = false;
  std::vector<int> fired_, expected_;  // by parameter, in this backward
  std::vector<bool> staged_;           // by parameter: its gradient is in the slot
  std::vector<at::Tensor> parts_;      // by parameter: the sum of those so far; undefined where none waits
  std::vector<bool> used_;
  int max_slots_in_use_ = 0;
  int impatient_passes_ = 0;  // this backward and those after it that do not wait in hooks
  int next_impatient_passes_ = 8;
};

}  // namespace tessera::zero
