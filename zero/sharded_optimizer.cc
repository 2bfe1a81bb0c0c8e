#include "zero/sharded_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/memory_use.h"
#include "zero/operator_listener.h"

namespace tessera::zero {

ShardedOptimizer::ShardedOptimizer(const Layout& layout, std::vector<at::Tensor> values,
                                   std::vector<at::Tensor> masters, comm::CommunicatorPtr comm,
                                   const Options& options)
    : layout_(layout),
      comm_(std::move(comm)),
      kind_(options.kind),
      sharding_(options.sharding),
      groups_(options.groups),
      units_(layout.num_units()),
      steps_(layout.parameters().size(), 0) {
  // SGD keeps a momentum buffer when any group has momentum.
  for (const kernels::Hyper& hyper : groups_) {
    const auto names = kernels::state_names(kind_, hyper);
    if (names.size() > state_names_.size()) state_names_ = names;
  }
  const MemoryFor use(MemoryUse::kOptimizer);
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    if (!layout_.units()[unit].trainable) continue;
    UnitState& state = units_[unit];
    state.region =
        sharding_.optimizer ? layout_.shard(unit, comm_->rank()) : Range{0, layout_.units()[unit].numel};
    state.value = values[unit];
    state.master = masters[unit];
    device_ = state.master.device();
    TESSERA_CHECK(state.master.numel() == state.region.numel() &&
                  state.value.numel() == state.region.numel());
    for (size_t i = 0; i < state_names_.size(); ++i) state.states.push_back(at::zeros_like(state.master));
  }
}

std::vector<std::vector<double>> ShardedOptimizer::all_gather(const std::vector<double>& mine,
                                                              std::string_view label) {
  const auto num = static_cast<int64_t>(mine.size());
  at::Tensor all = at::empty({comm_->size() * num}, at::TensorOptions().dtype(at::kDouble));
  at::Tensor part = all.narrow(0, comm_->rank() * num, num);
  std::copy(mine.begin(), mine.end(), part.data_ptr<double>());
  if (comm_->size() > 1) {
    at::Tensor on_device = all.to(device_);
    comm_->all_gather(on_device, on_device.narrow(0, comm_->rank() * num, num), label)->wait();
    all = on_device.cpu();
  }
  std::vector<std::vector<double>> parts;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const double* begin = all.data_ptr<double>() + rank * num;
    parts.emplace_back(begin, begin + num);
  }
  return parts;
}

GradientSummary ShardedOptimizer::summarize(const GradientReducer& gradients, bool raise_flag) {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  const int num_units = layout_.num_units();
  const auto num_parameters = static_cast<int>(layout_.parameters().size());
  // {sum of squares, non-finite elements, first parameter with one or -1, flag}
  // {late, by unit} {used, by parameter}
  std::vector<double> mine{0, 0, -1, raise_flag ? 1.0 : 0.0};
  for (int unit = 0; unit < num_units; ++unit) {
    if (!layout_.units()[unit].trainable) continue;
    const at::Tensor shard = gradients.shard(unit);
    const kernels::NormPart part = kernels::squared_norm(shard);
    mine[0] += part.sum_of_squares;
    mine[1] += static_cast<double>(part.num_nonfinite);
    if (part.num_nonfinite > 0 && mine[2] < 0) {
      const int64_t element = layout_.shard(unit, comm_->rank()).begin + kernels::first_nonfinite(shard);
      for (int parameter : layout_.units()[unit].parameters)
        if (intersect(layout_.slot(parameter).range(), {element, element + 1}).numel() > 0)
          mine[2] = parameter;
    }
  }
  for (bool late : gradients.late_units()) mine.push_back(late);
  for (bool used : gradients.used()) mine.push_back(used);

  GradientSummary summary;
  summary.used.resize(num_parameters);
  std::vector<bool> late(num_units);
  double sum_of_squares = 0;
  int first_nonfinite = num_parameters;
  for (const std::vector<double>& part : all_gather(mine, "gradient norm")) {
    sum_of_squares += part[0];
    summary.num_nonfinite += static_cast<int64_t>(part[1]);
    if (part[2] >= 0) first_nonfinite = std::min(first_nonfinite, static_cast<int>(part[2]));
    if (part[3] != 0) summary.flag_raised = true;
    for (int unit = 0; unit < num_units; ++unit)
      if (part[4 + unit] != 0) late[unit] = true;
    for (int parameter = 0; parameter < num_parameters; ++parameter)
      if (part[4 + num_units + parameter] != 0) summary.used[parameter] = true;
  }
  summary.norm = std::sqrt(sum_of_squares);
  if (first_nonfinite < num_parameters) summary.first_nonfinite = layout_.parameters()[first_nonfinite].name;
  for (int unit = 0; unit < num_units; ++unit)
    if (late[unit]) summary.late_units.push_back(unit);
  return summary;
}

/// The parts of a unit this rank updates. Neighbours with one group and step count become one
/// piece, padding between them included (zeros stay zeros under every optimizer);
/// `by_parameter` keeps them apart. Cut at shards.
std::vector<ShardedOptimizer::Piece> ShardedOptimizer::pieces(int unit, const std::vector<bool>& used,
                                                              bool by_parameter) const {
  std::vector<Piece> found;
  const Range region = units_[unit].region;
  for (int parameter : layout_.units()[unit].parameters) {
    const Range range = intersect(layout_.slot(parameter).range(), region);
    if (range.numel() == 0 || !used[parameter]) continue;
    if (by_parameter) {
      found.push_back({unit, parameter, range});
      continue;
    }
    const bool follows =
        !found.empty() && steps_[found.back().parameter] == steps_[parameter] &&
        layout_.parameters()[found.back().parameter].group == layout_.parameters()[parameter].group;
    // Only padding may lie between, not a parameter that has no gradient.
    if (follows && no_parameter_between(unit, found.back().range.end, range.begin)) {
      found.back().range.end = range.end;
    } else {
      found.push_back({unit, parameter, range});
    }
  }
  return cut_at_shards(found);
}

/// Gradients come from the rank that owns the shard, and so do norms. (Beyond stage 0
/// nothing is cut: the region is one shard.)
std::vector<ShardedOptimizer::Piece> ShardedOptimizer::cut_at_shards(const std::vector<Piece>& pieces) const {
  std::vector<Piece> found;
  for (const Piece& piece : pieces) {
    const int64_t shard_numel = layout_.shard_numel(piece.unit);
    for (int64_t begin = piece.range.begin; begin < piece.range.end;) {
      const int64_t end = std::min(piece.range.end, (begin / shard_numel + 1) * shard_numel);
      found.push_back({piece.unit, piece.parameter, {begin, end}});
      begin = end;
    }
  }
  return found;
}

bool ShardedOptimizer::no_parameter_between(int unit, int64_t begin, int64_t end) const {
  const std::vector<int>& members = layout_.units()[unit].parameters;
  return std::none_of(members.begin(), members.end(), [&](int parameter) {
    return intersect(layout_.slot(parameter).range(), {begin, end}).numel() > 0;
  });
}

kernels::Segment ShardedOptimizer::segment(const Piece& piece, const GradientReducer& gradients) const {
  const UnitState& unit = units_[piece.unit];
  const auto cut = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, piece.range.begin - unit.region.begin, piece.range.numel());
  };
  kernels::Segment segment;
  segment.master = cut(unit.master);
  segment.grad = gradients.reduced(piece.unit, piece.range);
  for (const at::Tensor& state : unit.states) segment.state.push_back(cut(state));
  if (unit.value.data_ptr() != unit.master.data_ptr()) segment.param = cut(unit.value);
  return segment;
}

void ShardedOptimizer::step(const GradientReducer& gradients, double grad_scale,
                            const std::vector<bool>& used) {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  if (kind_ == kernels::OptimizerKind::kLamb) {
    step_lamb(gradients, grad_scale, used);
  } else {
    for (int unit = 0; unit < layout_.num_units(); ++unit) {
      if (!layout_.units()[unit].trainable) continue;
      for (const Piece& piece : pieces(unit, used, /*by_parameter=*/false)) {
        const kernels::Hyper& hyper = groups_[layout_.parameters()[piece.parameter].group];
        kernels::update(kind_, hyper, steps_[piece.parameter] + 1, grad_scale, segment(piece, gradients));
      }
    }
  }
  for (size_t parameter = 0; parameter < used.size(); ++parameter)
    if (used[parameter]) ++steps_[parameter];
}

void ShardedOptimizer::step_lamb(const GradientReducer& gradients, double grad_scale,
                                 const std::vector<bool>& used) {
  std::vector<double> mine(2 * layout_.parameters().size(), 0.0);
  std::vector<Piece> all;
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    if (!layout_.units()[unit].trainable) continue;
    const Range shard = layout_.shard(unit, comm_->rank());
    for (const Piece& piece : pieces(unit, used, /*by_parameter=*/true)) {
      const kernels::Hyper& hyper = groups_[layout_.parameters()[piece.parameter].group];
      const kernels::LambPart part =
          kernels::lamb_norms(hyper, steps_[piece.parameter] + 1, grad_scale, segment(piece, gradients));
      all.push_back(piece);
      if (intersect(piece.range, shard).numel() == 0)
        continue;  // stage 0: that part is another rank's to report
      mine[2 * piece.parameter] += part.weight_sq;
      mine[2 * piece.parameter + 1] += part.update_sq;
    }
  }
  std::vector<kernels::LambPart> totals(layout_.parameters().size());
  for (const std::vector<double>& part : all_gather(mine, "LAMB norms"))
    for (size_t parameter = 0; parameter < totals.size(); ++parameter) {
      totals[parameter].weight_sq += part[2 * parameter];
      totals[parameter].update_sq += part[2 * parameter + 1];
    }
  for (const Piece& piece : all) {
    const kernels::Hyper& hyper = groups_[layout_.parameters()[piece.parameter].group];
    kernels::lamb_apply(hyper, steps_[piece.parameter] + 1,
                        kernels::lamb_trust_ratio(hyper, totals[piece.parameter]), segment(piece, gradients));
  }
}

int64_t ShardedOptimizer::master_bytes() const {
  int64_t bytes = 0;
  for (const UnitState& unit : units_)
    if (unit.master.defined() && unit.master.data_ptr() != unit.value.data_ptr())
      bytes += unit.master.nbytes();
  return bytes;
}

int64_t ShardedOptimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const UnitState& unit : units_)
    for (const at::Tensor& state : unit.states) bytes += state.nbytes();
  return bytes;
}

}  // namespace tessera::zero
