// GradientAccumulator: takes gradients out of `p.grad` as they come, and adds them up in their units'
// accumulators, or in the slots that they are reduced from. All of it is local; GradientReducer says where a
// gradient goes, and when.
//
// [Note: gradients in parts]
// Re-entrant recomputation gives a parameter its gradient in parts, a hook each. Where slots round (another
// dtype than the accumulators', or a scale before the sum) the parts are added up in the accumulators' dtype
// first, as stages 0 and 1 do, and the sum goes into the slot once: so all stages round alike. How many parts
// there are the first backward shows; a part beyond those expected is late at every stage, and reduced on its
// own. A parameter with one part needs no memory for that.
//
// [Note: nothing to sum]
// Where a unit's ranks are one rank, a slot would only be copied into the accumulator. There the accumulator
// is the slot: a gradient goes from p.grad into it, rounded as it would be in a slot of communicate_dtype,
// and is added where a micro-step before has left something. So the bits are those of the way through a slot,
// in one pass over memory instead of two, and there are no slots.
//
// [Note: gradients wait for each other]
// On CUDA a launch for each gradient is what small parameters cost. There gradients taken from p.grad are
// kept until they are `max_waiting_bytes` together, or until their memory is asked for (a unit's reduction,
// the end of backward), and then one launch takes all of them, of whatever units. So the memory of gradients
// grows by that bound, and large ones don't wait. A parameter's next part is never in one launch with the one
// before. On the CPU nothing is gained, and none waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "zero/kernels/kernels.h"
#include "zero/memory/stream_order.h"
#include "zero/plan/layout.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// Used by one thread at a time: autograd's in hooks, and the one that calls backward(). `parameters[i]` is
/// Layout parameter i. Layout and units must outlive it.
class GradientAccumulator {
 public:
  struct Options {
    at::ScalarType accumulate_dtype = at::kFloat;
    at::ScalarType communicate_dtype = at::kFloat;
    double prescale = 1;       ///< of what goes into a slot
    bool slots_round = false;  ///< see [Note: gradients in parts]
    bool single_rank = false;  ///< accumulators are the slots: see [Note: nothing to sum]
    /// See [Note: gradients wait for each other]; 0: none waits.
    int64_t max_waiting_bytes = 0;
  };
  GradientAccumulator(const Layout& layout, std::vector<ParamUnit>& units, std::vector<at::Tensor> parameters,
                      const Options& options);

  /// What Options::max_waiting_bytes should be.
  static int64_t max_waiting_bytes(at::Device device);

  /// `first`: the accumulators start anew.
  void begin_backward(bool first);
  /// What came late may be taken from p.grad from now on.
  void finish_backward();
  /// Drops all gradients that have come, also those that lie in p.grad.
  void drop();
  /// From now on a parameter is expected to have as many gradients a backward as it had in this one.
  void freeze_counts();

  // -- a gradient that has come: what these take is in its place at the latest after complete_slot(),
  // complete_accumulator() or finish_backward() --
  /// Where slots round: more gradients have come than expected, so this one is late.
  bool unexpected(int parameter) const;
  void defer(int parameter);
  /// Adds it to the unit's accumulator.
  void accumulate(int parameter);
  /// Where slots round: adds it to the parts that came before. Elsewhere nothing.
  void add_partial(int parameter);
  /// It may go into the slot: no further part is expected, or none needs to be waited for.
  bool ready_for_slot(int parameter) const;
  void copy_into_slot(int parameter, const at::Tensor& slot);
  /// What this thread's current stream is given from now on comes after what came before:
  /// [Note: streams of the model] in stream_order.h.
  void follow_stream();
  /// It has been dealt with. Returns whether its unit lacks no gradient now.
  bool mark_ready(int parameter);

  // -- before the unit's reduction: also takes what still lies in p.grad, and zeroes what never came --
  void complete_slot(const ParamUnit& unit, const at::Tensor& slot);
  void complete_accumulator(const ParamUnit& unit);
  /// Zeroes what has not come since the accumulators started anew.
  void zero_unused(const ParamUnit& unit) const;
  /// The unit has been reduced: none of its gradients is in the slot now.
  void leave_slot(const ParamUnit& unit);

  /// Of the backward under way, or the last one: the accumulators started anew with it.
  bool first() const { return first_; }
  bool in_backward() const { return in_backward_; }
  const at::Tensor& parameter(int parameter) const { return parameters_[parameter]; }
  /// By parameter: a gradient came on this rank since the accumulators started anew.
  const std::vector<bool>& used() const { return used_; }

 private:
  at::Tensor take_grad(int parameter);
  at::Tensor rounded_as_in_slot(const at::Tensor& grad) const;
  bool has_grad(int parameter) const;
  void put(int parameter, kernels::Accumulation gradient);
  void put_waiting();
  void zero_missing(const at::Tensor& flat, const ParamUnit& unit, const std::vector<bool>& came) const;

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  std::vector<at::Tensor> parameters_;
  Options options_;
  bool first_ = true, in_backward_ = false;
  // By parameter:
  std::vector<int> fired_, expected_;  // gradients in this backward
  std::vector<bool> in_slot_;          // the slot has something of it: of this backward, or, where
                                       // accumulators are the slots, since these started anew
  std::vector<at::Tensor> parts_;      // the sum of those so far; undefined where none waits
  std::vector<bool> used_;
  std::vector<int64_t> waits_for_;  // the number of the launch that its last gradient was given to

  std::vector<kernels::Accumulation> waiting_;
  int64_t num_launches_ = 0;  // the number of the one that waiting_ is for
  int64_t waiting_bytes_ = 0;
  StreamOrder streams_;
};

}  // namespace tessera::zero
