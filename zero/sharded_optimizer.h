// ShardedOptimizer: updates the elements that this rank updates (its shards; whole units at stage 0), cut
// into segments that share hyper-parameters and step count. Masters and states are the units'.
//
// [Note: the same numbers at every stage]
// The norm of the gradients is computed shard by shard at every stage, stage 0 included: rank r
// sums shard r, the parts are all-gathered and added in rank order. The update itself is
// elementwise. So nothing depends on the stage.
//
// [Note: parameters without a gradient]
// A parameter that received no gradient on any rank is left alone, step count and moments included, as
// torch.optim leaves parameters whose .grad is None. Hence each parameter has its own step count.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "zero/gradient_reducer.h"
#include "zero/kernels/kernels.h"
#include "zero/layout.h"
#include "zero/param_unit.h"
#include "zero/update_rule.h"

namespace tessera::zero {

class ShardedOptimizer {
 public:
  struct Options {
    kernels::OptimizerKind kind = kernels::OptimizerKind::kAdamW;
    std::vector<kernels::Hyper> groups;                ///< by ParameterSpec::group
    std::shared_ptr<const UpdateRule> rule = nullptr;  ///< in place of `kind`'s formula
  };

  /// Local. Gives the trainable units their states: zeros. Layout and units must outlive it.
  ShardedOptimizer(const Layout& layout, std::vector<ParamUnit>& units, comm::CommunicatorPtr comm,
                   const Options& options);

  /// Local; Collective for LAMB, whose trust ratios need each parameter's norms over all shards. Updates
  /// values and masters; `grad_scale` multiplies the gradients first. `used`: by parameter, what to update.
  void step(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used);

  std::vector<kernels::Hyper>& groups() { return groups_; }
  /// Of ParamUnit::states, in their order.
  const std::vector<std::string>& state_names() const { return state_names_; }
  /// Updates a parameter has had (Adam's step count).
  int64_t steps(int parameter) const { return steps_[parameter]; }
  /// Local. Continues from a checkpoint.
  void set_steps(int parameter, int64_t steps) { steps_[parameter] = steps; }

 private:
  /// Neighbouring elements that one call of a kernel updates.
  struct Stretch {
    ParamUnit* unit;
    int parameter;  // the first one
    Range range;    // in the unit's elements
  };

  std::vector<Stretch> stretches(ParamUnit& unit, const std::vector<bool>& used, bool by_parameter) const;
  std::vector<Stretch> cut_at_shards(const std::vector<Stretch>& stretches) const;
  bool no_parameter_between(const ParamUnit& unit, int64_t begin, int64_t end) const;
  kernels::Segment segment(const Stretch& stretch, const GradientReducer& gradients) const;
  void update(const Stretch& stretch, const GradientReducer& gradients, double grad_scale) const;
  void step_lamb(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used);

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  comm::CommunicatorPtr comm_;
  kernels::OptimizerKind kind_;
  std::shared_ptr<const UpdateRule> rule_;
  std::vector<kernels::Hyper> groups_;
  std::vector<std::string> state_names_;
  std::vector<int64_t> steps_;  // by parameter
  at::Device device_ = at::kCPU;
};

}  // namespace tessera::zero
