// ShardedOptimizer: fp32 master weights and optimizer state of the elements this rank updates (its shards;
// whole units at stage 0), cut into segments that share hyper-parameters and step count.
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

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "zero/gradient_reducer.h"
#include "zero/kernels/kernels.h"
#include "zero/layout.h"
#include "zero/stage.h"

namespace tessera::zero {

/// What all ranks know of the accumulated gradients before an update.
struct GradientSummary {
  double norm =
      0;  ///< L2, over all parameters and ranks, of the gradients as accumulated (loss scale included)
  int64_t num_nonfinite = 0;
  std::string first_nonfinite;  ///< name of the first parameter with such an element
  std::vector<bool> used;       ///< by parameter: some rank had a gradient
  std::vector<int> late_units;  ///< see GradientReducer::late_units
  bool flag_raised = false;     ///< some rank raised its flag
};

class ShardedOptimizer {
 public:
  struct Options {
    Sharding sharding;
    kernels::OptimizerKind kind = kernels::OptimizerKind::kAdamW;
    std::vector<kernels::Hyper> groups;  ///< by ParameterSpec::group
  };

  /// By unit: `values`: what this rank updates, compute dtype, (unit numel) at stage 0, else
  /// (shard_numel); `masters`: the same elements in fp32, the same tensor where the compute
  /// dtype is fp32. Frozen units: undefined.
  ShardedOptimizer(const Layout& layout, std::vector<at::Tensor> values, std::vector<at::Tensor> masters,
                   comm::CommunicatorPtr comm, const Options& options);

  /// Collective (one small all-gather). `raise_flag`: see GradientSummary::flag_raised.
  GradientSummary summarize(const GradientReducer& gradients, bool raise_flag = false);
  /// Local; Collective for LAMB, whose trust ratios need each parameter's norms over all shards. Updates
  /// values and masters; `grad_scale` multiplies the gradients first.
  void step(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used);

  std::vector<kernels::Hyper>& groups() { return groups_; }
  const at::Tensor& master(int unit) const { return units_[unit].master; }
  /// The i-th state tensor of a unit, in the order of state_names(); same shape as master(unit).
  const at::Tensor& state(int unit, int i) const { return units_[unit].states[i]; }
  const std::vector<std::string_view>& state_names() const { return state_names_; }
  /// Updates a parameter has had (Adam's step count).
  int64_t steps(int parameter) const { return steps_[parameter]; }
  /// Local. Continues from a checkpoint.
  void set_steps(int parameter, int64_t steps) { steps_[parameter] = steps; }

  int64_t master_bytes() const;  ///< masters kept beside the parameters (0 in fp32)
  int64_t state_bytes() const;

 private:
  struct UnitState {
    Range region;  // what this rank updates, in the unit's elements
    at::Tensor value, master;
    std::vector<at::Tensor> states;
  };
  struct Piece {
    int unit;
    int parameter;  // the first one
    Range range;    // in the unit's elements
  };

  std::vector<Piece> pieces(int unit, const std::vector<bool>& used, bool by_parameter) const;
  std::vector<Piece> cut_at_shards(const std::vector<Piece>& pieces) const;
  bool no_parameter_between(int unit, int64_t begin, int64_t end) const;
  kernels::Segment segment(const Piece& piece, const GradientReducer& gradients) const;
  void step_lamb(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used);
  std::vector<std::vector<double>> all_gather(const std::vector<double>& mine, std::string_view label);

  const Layout& layout_;
  comm::CommunicatorPtr comm_;
  kernels::OptimizerKind kind_;
  Sharding sharding_;
  std::vector<kernels::Hyper> groups_;
  std::vector<std::string_view> state_names_;
  std::vector<UnitState> units_;
  std::vector<int64_t> steps_;  // by parameter
  at::Device device_ = at::kCPU;
};

}  // namespace tessera::zero
