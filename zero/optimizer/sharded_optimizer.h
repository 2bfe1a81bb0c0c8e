// ShardedOptimizer: updates the elements that this rank updates (its shards; whole units at stage 0), cut
// into segments that share hyper-parameters and step count. Masters and states are the units'.
//
// The norm of the gradients is computed shard by shard at every stage, stage 0 included: rank r
// sums shard r, the parts are all-gathered and added in rank order. The update itself is
// elementwise. So nothing depends on the stage.
//
// Parameters without a gradient.
// A parameter that received no gradient on any rank is left alone, step count and moments included, as
// torch.optim leaves parameters whose .grad is None. Hence each parameter has its own step count.
//
// [Note: deferred updates]
// Where state lies below the device, step() does not update: each unit is updated before it is read again, in
// the order of the recorded pass. Where the device's memory is the host's, that is right before, while its
// neighbours are fetched and written. Else a thread of the host goes through the units at once, while the
// device computes on those that are done, and whoever reads a unit waits for its update alone. (A user's
// rule, LAMB and Muon run on the thread that calls.) What the update depends on is known and kept by
// begin_step(): the scale with the clip coefficient, rates, step counts, which parameters to update; and
// gradients stay where they are until the next backward begins. So the bits are those of an update at once.
// Who reads the state in another way calls finish_step() first. LAMB's norms need all units, and so do
// Muon and an optimizer of whole parameters, so these are never late.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/memory/host_thread.h"
#include "zero/kernels/kernels.h"
#include "zero/memory/buffer_pool.h"
#include "zero/optimizer/update_rule.h"
#include "zero/optimizer/whole_parameters.h"
#include "zero/plan/layout.h"
#include "zero/reduce/gradient_reducer.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// Updates the shards of one rank.
class ShardedOptimizer {
 public:
  struct Options {
    kernels::OptimizerKind kind = kernels::OptimizerKind::kAdamW;
    std::vector<kernels::Hyper> groups;                ///< by ParameterSpec::group
    std::shared_ptr<const UpdateRule> rule = nullptr;  ///< in place of `kind`'s formula
    /// In place of a formula: see [Note: whole parameters]. Not with a `transfer`.
    std::shared_ptr<WholeOptimizer> whole = nullptr;
    std::vector<at::Tensor> parameters = {};  ///< the model's, for `whole`; by parameter of the layout
    comm::HostTransfer* transfer = nullptr;   ///< where the host's memory is not the device's
    comm::HostThread* host = nullptr;
  };

  /// Gives the trainable units their states: zeros. Layout and units must outlive it.
  ShardedOptimizer(const Layout& layout, std::vector<ParamUnit>& units, comm::CommunicatorPtr comm,
                   const Options& options);

  /// Collective for LAMB, whose trust ratios need each parameter's norms over all shards, for Muon, and for
  /// an optimizer of whole parameters; these update at once. An update of values and masters begins;
  /// `grad_scale` multiplies the gradients first. `used`: by parameter, what to update. `order`: units, as
  /// they will be updated. `gradients` must outlive the update.
  void begin_step(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used,
                  const std::vector<int>& order);
  /// Updates the unit, if it has not been since begin_step(). Throws Error when the disk fails.
  void update(ParamUnit& unit);
  /// Updates all units that have not been.
  void finish_step();
  /// Is called after an update that failed. Leaves the units that have not been updated as they are. All of
  /// the state has to be replaced afterwards.
  void drop_step();

  /// Null: it updates elements.
  WholeParameters* whole() { return whole_ ? &*whole_ : nullptr; }
  const WholeParameters* whole() const { return whole_ ? &*whole_ : nullptr; }
  /// Hyper-parameters by param group, for the next step.
  std::vector<kernels::Hyper>& groups() { return groups_; }
  kernels::OptimizerKind kind() const { return kind_; }
  /// Returns the names of ParamUnit::states, in their order.
  const std::vector<std::string>& state_names() const { return state_names_; }
  /// Whether Muon updates it, by parameter; empty: another optimizer.
  const std::vector<bool>& by_muon() const { return by_muon_; }
  /// Updates a parameter has had (Adam's step count), those to come of the step that has begun included.
  int64_t steps(int parameter) const { return steps_[parameter]; }
  /// Continues from a checkpoint.
  void set_steps(int parameter, int64_t steps) { steps_[parameter] = steps; }

 private:
  /// Neighbouring elements with one rule, rates and step count.
  struct ParamRange {
    ParamUnit* unit;
    int parameter;  // the first one
    Range range;    // in the unit's elements
  };

  std::vector<ParamRange> ranges(ParamUnit& unit, const std::vector<bool>& used, bool by_parameter) const;
  std::vector<ParamRange> cut_at_pieces(const std::vector<ParamRange>& ranges) const;
  bool no_parameter_between(const ParamUnit& unit, int64_t begin, int64_t end) const;
  /// What passes through the host's memory while a unit is updated there; undefined: it lies where the update
  /// reads and writes.
  struct StagedUnit {
    BufferPool::Buffer gradient = {}, values = {};
    comm::EventPtr values_arrive = nullptr;
  };
  enum class Takes { kGradient, kValues, kBoth };

  size_t num_states_read(const ParamRange& range) const;
  static at::Tensor part_of(const at::Tensor& local, const ParamRange& range);
  kernels::SegmentUpdate update_of(const ParamRange& range, const StagedUnit& staged) const;
  std::vector<kernels::SegmentUpdate> updates_of(const std::vector<ParamRange>& ranges,
                                                 const StagedUnit& staged) const;
  void apply_rule(const kernels::SegmentUpdate& update) const;
  void update(const std::vector<ParamRange>& ranges, StagedUnit& staged) const;
  void update_now(ParamUnit& unit);
  void step_lamb();
  at::Tensor scaled_gradient(const kernels::SegmentUpdate& update) const;
  bool steps_by_muon(int parameter) const { return by_muon_[parameter] && step_->used[parameter]; }
  bool steps_by_muon(const ParamUnit& unit) const;
  void step_muon();
  void propose(ParamUnit& unit, std::vector<OwnedParameter>& owned);
  void apply_muon(ParamUnit& unit, std::vector<OwnedParameter>& owned,
                  const std::vector<kernels::Hyper>& adam);
  std::vector<kernels::LambPart> lamb_totals();
  StagedUnit stage_in(ParamUnit& unit, Takes takes);
  BufferPool::Buffer begin_to_bring_gradient(const ParamUnit& unit);
  void copy_back(const ParamRange& range, StagedUnit& staged) const;
  void stage_out(ParamUnit& unit, StagedUnit staged);

  /// What the update that has begun depends on.
  struct Step {
    const GradientReducer* gradients;
    double grad_scale;
    std::vector<bool> used;              // by parameter
    std::vector<kernels::Hyper> groups;  // as they were when it began
    std::vector<int> order;
    std::vector<bool> updated;  // by unit
    // The device has read the values that are replaced, and has the gradients.
    comm::EventPtr begun = nullptr;
    std::vector<comm::HostThread::Task> tasks = {};  // by unit: its update
  };

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  comm::CommunicatorPtr comm_;
  kernels::OptimizerKind kind_;
  std::shared_ptr<const UpdateRule> rule_;
  std::optional<WholeParameters> whole_;
  std::vector<kernels::Hyper> groups_;
  std::vector<std::string> state_names_;
  std::vector<int64_t> steps_;  // by parameter
  std::vector<bool> by_muon_ = {};
  std::vector<int> owners_ = {};  // of Muon's matrices, by parameter
  std::optional<Step> step_;      // some unit is still to be updated
  at::Device device_ = at::kCPU;
  comm::HostTransfer* transfer_;
  comm::HostThread* host_;
  std::optional<BufferPool> staging_;  // host memory; used by the thread that updates
  std::pair<int, BufferPool::Buffer> next_gradient_ = {-1, {}};  // by unit: on its way
};

/// Names of the states that each trainable element has. Throws ConfigError for an update rule's name
/// that a checkpoint could not hold.
std::vector<std::string> state_names_of(const ShardedOptimizer::Options& options);

}  // namespace tessera::zero
