#include "zero/sharded_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cctype>

#include "core/check.h"
#include "core/error.h"
#include "core/memory_use.h"
#include "zero/gradient_summary.h"
#include "zero/operator_listener.h"

namespace tessera::zero {

/// Checkpoints have the states under these names.
static std::vector<std::string> checked(std::vector<std::string> names, const std::string& rule) {
  const auto valid = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    const bool taken =
        name == "master" || name == "parameter" || std::count(names.begin(), names.end(), name) > 1;
    if (name.empty() || taken || !std::all_of(name.begin(), name.end(), valid))
      throw ConfigError(
          str("update rule ", rule, ": state ", i, " is named \"", name,
              "\"; expected a name of its own of letters, digits and _, and not master or parameter"));
  }
  return names;
}

ShardedOptimizer::ShardedOptimizer(const Layout& layout, std::vector<ParamUnit>& units,
                                   comm::CommunicatorPtr comm, const Options& options)
    : layout_(layout),
      units_(units),
      comm_(std::move(comm)),
      kind_(options.kind),
      rule_(options.rule),
      groups_(options.groups),
      steps_(layout.parameters().size(), 0) {
  if (rule_) state_names_ = checked(rule_->state_names(), rule_->name());
  // SGD keeps a momentum buffer when any group has momentum.
  for (const kernels::Hyper& hyper : groups_) {
    const auto names = kernels::state_names(kind_, hyper);
    if (!rule_ && names.size() > state_names_.size()) state_names_.assign(names.begin(), names.end());
  }
  const MemoryFor use(MemoryUse::kOptimizer);
  for (ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    device_ = unit.master.device();
    for (size_t i = 0; i < state_names_.size(); ++i) unit.states.push_back(at::zeros_like(unit.master));
  }
}

/// The parts of a unit this rank updates, each within one shard. Neighbours in a shard with one group and
/// step count become one stretch, padding between them included (zeros stay zeros); `by_parameter` keeps them
/// apart. A shard gives the same stretches at every stage: libtorch's operators, which an UpdateRule may use,
/// round by an element's place.
std::vector<ShardedOptimizer::Stretch> ShardedOptimizer::stretches(ParamUnit& unit,
                                                                   const std::vector<bool>& used,
                                                                   bool by_parameter) const {
  std::vector<Stretch> each;
  for (int parameter : unit.spec.parameters) {
    const Range range = intersect(layout_.slice(parameter).range(), unit.local_range());
    if (range.numel() > 0 && used[parameter]) each.push_back({&unit, parameter, range});
  }
  each = cut_at_shards(each);
  if (by_parameter) return each;
  std::vector<Stretch> joined;
  const int64_t shard_numel = unit.shard_range.numel();
  for (const Stretch& next : each) {
    const bool follows =
        !joined.empty() && joined.back().range.begin / shard_numel == next.range.begin / shard_numel &&
        steps_[joined.back().parameter] == steps_[next.parameter] &&
        layout_.parameters()[joined.back().parameter].group == layout_.parameters()[next.parameter].group;
    // Only padding may lie between, not a parameter that has no gradient.
    if (follows && no_parameter_between(unit, joined.back().range.end, next.range.begin)) {
      joined.back().range.end = next.range.end;
    } else {
      joined.push_back(next);
    }
  }
  return joined;
}

/// Gradients come from the rank that owns the shard, and so do norms. (Beyond stage 0 nothing is cut: a rank
/// updates one shard.)
std::vector<ShardedOptimizer::Stretch> ShardedOptimizer::cut_at_shards(
    const std::vector<Stretch>& stretches) const {
  std::vector<Stretch> found;
  for (const Stretch& stretch : stretches) {
    const int64_t shard_numel = stretch.unit->shard_range.numel();
    for (int64_t begin = stretch.range.begin; begin < stretch.range.end;) {
      const int64_t end = std::min(stretch.range.end, (begin / shard_numel + 1) * shard_numel);
      found.push_back({stretch.unit, stretch.parameter, {begin, end}});
      begin = end;
    }
  }
  return found;
}

bool ShardedOptimizer::no_parameter_between(const ParamUnit& unit, int64_t begin, int64_t end) const {
  const std::vector<int>& members = unit.spec.parameters;
  return std::none_of(members.begin(), members.end(), [&](int parameter) {
    return intersect(layout_.slice(parameter).range(), {begin, end}).numel() > 0;
  });
}

kernels::Segment ShardedOptimizer::segment(const Stretch& stretch, const GradientReducer& gradients) const {
  const ParamUnit& unit = *stretch.unit;
  const auto cut = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, stretch.range.begin - unit.local_range().begin, stretch.range.numel());
  };
  kernels::Segment segment;
  segment.master = cut(unit.master);
  segment.grad = gradients.reduced(unit, stretch.range);
  for (const at::Tensor& state : unit.states) segment.state.push_back(cut(state));
  if (unit.has_own_master()) segment.param = cut(unit.values());
  return segment;
}

void ShardedOptimizer::update(const Stretch& stretch, const GradientReducer& gradients,
                              double grad_scale) const {
  const kernels::Hyper& hyper = groups_[layout_.parameters()[stretch.parameter].group];
  const int64_t number = steps_[stretch.parameter] + 1;
  const kernels::Segment elements = segment(stretch, gradients);
  if (!rule_) return kernels::update(kind_, hyper, number, grad_scale, elements);
  at::Tensor gradient = elements.grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(grad_scale);
  rule_->update({elements.master, std::move(gradient), elements.state},
                {number, hyper.lr, hyper.weight_decay});
  if (elements.param.defined()) at::Tensor(elements.param).copy_(elements.master);
}

void ShardedOptimizer::step(const GradientReducer& gradients, double grad_scale,
                            const std::vector<bool>& used) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  if (kind_ == kernels::OptimizerKind::kLamb && !rule_) {
    step_lamb(gradients, grad_scale, used);
  } else {
    for (ParamUnit& unit : units_) {
      if (!unit.spec.trainable) continue;
      for (const Stretch& stretch : stretches(unit, used, /*by_parameter=*/false))
        update(stretch, gradients, grad_scale);
    }
  }
  for (size_t parameter = 0; parameter < used.size(); ++parameter)
    if (used[parameter]) ++steps_[parameter];
}

void ShardedOptimizer::step_lamb(const GradientReducer& gradients, double grad_scale,
                                 const std::vector<bool>& used) {
  std::vector<double> mine(2 * layout_.parameters().size(), 0.0);
  std::vector<Stretch> all;
  for (ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    for (const Stretch& stretch : stretches(unit, used, /*by_parameter=*/true)) {
      const kernels::Hyper& hyper = groups_[layout_.parameters()[stretch.parameter].group];
      const kernels::LambPart part =
          kernels::lamb_norms(hyper, steps_[stretch.parameter] + 1, grad_scale, segment(stretch, gradients));
      all.push_back(stretch);
      if (intersect(stretch.range, unit.shard_range).numel() == 0)
        continue;  // stage 0: that part is another rank's to report
      const auto place = 2 * static_cast<size_t>(stretch.parameter);
      mine[place] += part.weight_sq;
      mine[place + 1] += part.update_sq;
    }
  }
  std::vector<kernels::LambPart> totals(layout_.parameters().size());
  for (const std::vector<double>& part : all_gather_doubles(*comm_, device_, mine, "LAMB norms"))
    for (size_t parameter = 0; parameter < totals.size(); ++parameter) {
      totals[parameter].weight_sq += part[2 * parameter];
      totals[parameter].update_sq += part[2 * parameter + 1];
    }
  for (const Stretch& stretch : all) {
    const kernels::Hyper& hyper = groups_[layout_.parameters()[stretch.parameter].group];
    kernels::lamb_apply(hyper, steps_[stretch.parameter] + 1,
                        kernels::lamb_trust_ratio(hyper, totals[stretch.parameter]),
                        segment(stretch, gradients));
  }
}

}  // namespace tessera::zero
