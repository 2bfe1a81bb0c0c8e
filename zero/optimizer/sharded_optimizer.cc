#include "zero/optimizer/sharded_optimizer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <span>

#include "core/check.h"
#include "core/error.h"
#include "core/memory/memory_use.h"
#include "zero/memory/pause_listening.h"
#include "zero/optimizer/muon.h"
#include "zero/plan/owners.h"
#include "zero/reduce/gradient_summary.h"

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
          "update rule ", rule, ": state ", i, " is named \"", name,
          "\"; expected a name of its own of letters, digits and _, and not master or parameter");
  }
  return names;
}

std::vector<std::string> state_names_of(const ShardedOptimizer::Options& options) {
  if (options.rule) return checked(options.rule->state_names(), options.rule->name());
  if (options.whole) return {};  // it keeps them itself
  // Of all groups: SGD keeps a momentum buffer when any has momentum.
  std::vector<std::string> names;
  for (const kernels::Hyper& hyper : options.groups) {
    const auto of_group = kernels::state_names(options.kind, hyper);
    if (of_group.size() > names.size()) names.assign(of_group.begin(), of_group.end());
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
      state_names_(state_names_of(options)),
      steps_(layout.parameters().size(), 0),
      transfer_(options.transfer),
      host_(options.host) {
  if (transfer_ != nullptr)
    staging_.emplace(
        BufferPool::Options{.max_free = 4,
                            .allocate = [this](int64_t bytes) { return transfer_->host_memory(bytes); },
                            .transfer = transfer_});
  if (options.whole) {
    TESSERA_CHECK(!options.rule && transfer_ == nullptr);
    whole_.emplace(layout_, units_, options.parameters, comm_, options.whole);
  }
  if (kind_ == kernels::OptimizerKind::kMuon && !rule_ && !whole_) {
    std::vector<int64_t> costs;
    for (const ParameterSpec& spec : layout_.parameters()) {
      by_muon_.push_back(spec.trainable && groups_[spec.group].use_muon && is_muon_matrix(spec));
      costs.push_back(by_muon_.back() ? orthogonalization_cost(spec) : -1);
    }
    owners_ = owners_of(costs, comm_->size());
  }
  const MemoryFor use(MemoryUse::kOptimizer);
  for (ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    device_ = unit.memory.full().device();
    for (const std::string& name : state_names_)
      unit.states.push_back(unit.make(kOptimizer, unit.master.numel(), at::kFloat, name));
  }
}

/// The parts of a unit this rank updates, each within one owned part. Neighbours in a part with one group and
/// step count become one range, padding between them included (zeros stay zeros); `by_parameter` keeps them
/// apart. A part gives the same ranges at every stage: libtorch's operators, which an UpdateRule may use,
/// round by an element's place.
std::vector<ShardedOptimizer::ParamRange> ShardedOptimizer::ranges(ParamUnit& unit,
                                                                   const std::vector<bool>& used,
                                                                   bool by_parameter) const {
  std::vector<ParamRange> each;
  for (int parameter : unit.spec.parameters) {
    const Range range = intersect(layout_.slice(parameter).range(), unit.local_range());
    if (range.numel() > 0 && used[parameter]) each.push_back({&unit, parameter, range});
  }
  each = cut_at_pieces(each);
  if (by_parameter) return each;
  std::vector<ParamRange> joined;
  const int64_t piece_numel = unit.owned_range.numel();
  for (const ParamRange& next : each) {
    const bool follows =
        !joined.empty() && joined.back().range.begin / piece_numel == next.range.begin / piece_numel &&
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

/// Gradients come from the rank that owns the part, and so do norms. (Beyond stage 0, without replicas,
/// nothing is cut: a rank updates one part, its shard.)
std::vector<ShardedOptimizer::ParamRange> ShardedOptimizer::cut_at_pieces(
    const std::vector<ParamRange>& ranges) const {
  std::vector<ParamRange> found;
  for (const ParamRange& range : ranges) {
    const int64_t piece_numel = range.unit->owned_range.numel();
    for (int64_t begin = range.range.begin; begin < range.range.end;) {
      const int64_t end = std::min(range.range.end, (begin / piece_numel + 1) * piece_numel);
      found.push_back({range.unit, range.parameter, {begin, end}});
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

// ------------------------------------------------------------------------- what passes through the host

/// See [Note: state on the host]. The gradient of the unit that is updated next follows right behind.
ShardedOptimizer::StagedUnit ShardedOptimizer::stage_in(ParamUnit& unit, Takes takes) {
  StagedUnit staged;
  const Placement& placement = unit.placement;
  if (!placement.on_host(placement.optimizer)) return staged;
  unit.wait_for_copies_up();  // of the update before, or of the last gather
  if (takes != Takes::kValues && placement.gradient == Tier::kDevice) {
    const bool on_its_way = next_gradient_.first == unit.index;
    staged.gradient =
        on_its_way ? std::exchange(next_gradient_, {-1, {}}).second : begin_to_bring_gradient(unit);
    const auto next = std::next(std::find(step_->order.begin(), step_->order.end(), unit.index));
    if (next != step_->order.end() && next_gradient_.first < 0)
      next_gradient_ = {*next, begin_to_bring_gradient(units_[*next])};
    transfer_->synchronize(staged.gradient.free);
  }
  if (takes != Takes::kGradient && placement.copies_masters_to_device() &&
      unit.spec.dtype != DType::kFloat32) {
    staged.values = staging_->acquire(static_cast<int64_t>(unit.values().nbytes()));
    transfer_->synchronize(staged.values.free);
  }
  return staged;
}

/// The buffer has it when its event has passed.
BufferPool::Buffer ShardedOptimizer::begin_to_bring_gradient(const ParamUnit& unit) {
  const at::Tensor from = step_->gradients->reduced(unit, unit.local_range());
  BufferPool::Buffer buffer = staging_->acquire(static_cast<int64_t>(from.nbytes()));
  transfer_->synchronize(buffer.free);  // then only `begun` is left to follow
  buffer.free = transfer_->d2h(buffer.view(from.numel(), from.scalar_type()), from, step_->begun);
  return buffer;
}

/// Copies an fp32 unit's master itself: it changes with the next update only.
void ShardedOptimizer::copy_back(const ParamRange& range, StagedUnit& staged) const {
  const ParamUnit& unit = *range.unit;
  if (!unit.placement.copies_masters_to_device()) return;
  const at::Tensor& values = unit.values();
  const at::Tensor updated =
      staged.values.memory.defined() ? staged.values.view(values.numel(), values.scalar_type()) : unit.master;
  staged.values_arrive = transfer_->h2d(part_of(values, range), part_of(updated, range), step_->begun);
}

void ShardedOptimizer::stage_out(ParamUnit& unit, StagedUnit staged) {
  if (staged.gradient.memory.defined()) staging_->give_back(std::move(staged.gradient));
  if (staged.values.memory.defined()) {
    staged.values.free = staged.values_arrive;
    staging_->give_back(std::move(staged.values));
  } else if (staged.values_arrive && unit.is_on_disk(kOptimizer)) {
    transfer_->synchronize(staged.values_arrive);  // the master's buffer goes
  }
  if (staged.values_arrive) unit.values_arrive(std::move(staged.values_arrive));
}

// ------------------------------------------------------------------------------------------- the update

/// The first of them: SGD without momentum reads none, also where another group has momentum.
size_t ShardedOptimizer::num_states_read(const ParamRange& range) const {
  const int group = layout_.parameters()[range.parameter].group;
  return rule_ ? state_names_.size() : kernels::state_names(kind_, step_->groups[group]).size();
}

/// Of `local`, which has what this rank updates of the unit.
at::Tensor ShardedOptimizer::part_of(const at::Tensor& local, const ParamRange& range) {
  return local.narrow(0, range.range.begin - range.unit->local_range().begin, range.range.numel());
}

kernels::SegmentUpdate ShardedOptimizer::update_of(const ParamRange& range, const StagedUnit& staged) const {
  const ParamUnit& unit = *range.unit;
  kernels::Segment segment;
  segment.master = part_of(unit.master, range);
  segment.grad =
      staged.gradient.memory.defined()
          ? part_of(staged.gradient.view(unit.master.numel(), step_->gradients->accumulate_dtype()), range)
          : step_->gradients->reduced(unit, range.range);
  for (size_t state = 0; state < num_states_read(range); ++state)
    segment.state.push_back(part_of(unit.states[state], range));
  if (staged.values.memory.defined()) {
    segment.param = part_of(staged.values.view(unit.master.numel(), unit.values().scalar_type()), range);
  } else if (unit.has_own_master() && !unit.placement.copies_masters_to_device()) {
    segment.param = part_of(unit.values(), range);
  }
  return {&step_->groups[layout_.parameters()[range.parameter].group], steps_[range.parameter],
          std::move(segment)};
}

std::vector<kernels::SegmentUpdate> ShardedOptimizer::updates_of(const std::vector<ParamRange>& ranges,
                                                                 const StagedUnit& staged) const {
  std::vector<kernels::SegmentUpdate> updates;
  for (const ParamRange& range : ranges) updates.push_back(update_of(range, staged));
  return updates;
}

/// A copy in fp32.
at::Tensor ShardedOptimizer::scaled_gradient(const kernels::SegmentUpdate& update) const {
  const double scale = update.hyper->maximize ? -step_->grad_scale : step_->grad_scale;
  return update.segment.grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(scale);
}

void ShardedOptimizer::apply_rule(const kernels::SegmentUpdate& update) const {
  const kernels::Segment& elements = update.segment;
  rule_->update({elements.master, scaled_gradient(update), elements.state},
                {update.step, update.hyper->lr, update.hyper->weight_decay});
  if (elements.param.defined()) at::Tensor(elements.param).copy_(elements.master);
}

/// One launch on a device; where values are sent up, each range's as soon as it is there.
void ShardedOptimizer::update(const std::vector<ParamRange>& ranges, StagedUnit& staged) const {
  const bool one_by_one =
      rule_ || ranges.empty() || ranges.front().unit->placement.copies_masters_to_device();
  if (!one_by_one) return kernels::update(kind_, step_->grad_scale, updates_of(ranges, staged));
  for (const ParamRange& range : ranges) {
    const kernels::SegmentUpdate update = update_of(range, staged);
    if (rule_) {
      apply_rule(update);
    } else {
      kernels::update(kind_, step_->grad_scale, {update});
    }
    copy_back(range, staged);
  }
}

void ShardedOptimizer::begin_step(const GradientReducer& gradients, double grad_scale,
                                  const std::vector<bool>& used, const std::vector<int>& order) {
  TESSERA_CHECK(!step_);
  if (next_gradient_.first >= 0) staging_->give_back(std::exchange(next_gradient_, {-1, {}}).second);
  step_ = Step{.gradients = &gradients,
               .grad_scale = grad_scale,
               .used = used,
               .groups = groups_,
               .order = {},
               .updated = std::vector<bool>(units_.size(), true),
               .begun = transfer_ == nullptr ? nullptr : transfer_->record()};
  for (const int index : order) {
    if (!units_[index].spec.trainable) continue;
    step_->updated[index] = false;
    step_->order.push_back(index);
  }
  if (whole_) whole_->update(gradients, grad_scale, used, groups_);  // may refuse, and does not count then
  for (size_t parameter = 0; parameter < used.size(); ++parameter)
    if (used[parameter]) ++steps_[parameter];
  if (whole_) return step_.reset();
  if (kind_ == kernels::OptimizerKind::kLamb && !rule_) {
    step_lamb();
    return step_.reset();
  }
  if (!by_muon_.empty()) {
    step_muon();
    return step_.reset();
  }
  if (host_ == nullptr || rule_) return;
  step_->tasks.resize(units_.size());
  for (const int index : step_->order)
    step_->tasks[index] = host_->post([this, index] { update_now(units_[index]); });
}

void ShardedOptimizer::update(ParamUnit& unit) {
  if (!step_ || step_->updated[unit.index]) return;
  if (step_->tasks.empty()) {
    update_now(unit);
  } else {
    host_->wait(step_->tasks[unit.index]);
  }
  step_->updated[unit.index] = true;
}

void ShardedOptimizer::update_now(ParamUnit& unit) {
  const OurOwnWork scope;
  const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
  const InMemory updated(unit, kUpdated, InMemory::Access::kReadWrite);
  StagedUnit staged = stage_in(unit, Takes::kBoth);
  update(ranges(unit, step_->used, /*by_parameter=*/false), staged);
  stage_out(unit, std::move(staged));
}

void ShardedOptimizer::finish_step() {
  if (!step_) return;
  for (const int unit : step_->order) update(units_[unit]);
  step_.reset();
}

void ShardedOptimizer::drop_step() {
  if (step_ && !step_->tasks.empty()) host_->wait_for_all();
  step_.reset();
}

void ShardedOptimizer::step_lamb() {
  const OurOwnWork scope;
  const std::vector<kernels::LambPart> totals = lamb_totals();
  for (const int index : step_->order) {
    ParamUnit& unit = units_[index];
    const InMemory updated(unit, kUpdated, InMemory::Access::kReadWrite);
    StagedUnit staged = stage_in(unit, Takes::kValues);
    const std::vector<ParamRange> parts = ranges(unit, step_->used, /*by_parameter=*/true);
    const std::vector<kernels::SegmentUpdate> updates = updates_of(parts, staged);
    std::vector<double> ratios;
    for (size_t i = 0; i < parts.size(); ++i)
      ratios.push_back(kernels::lamb_trust_ratio(*updates[i].hyper, totals[parts[i].parameter]));
    kernels::lamb_apply(updates, ratios);
    for (const ParamRange& range : parts) copy_back(range, staged);
    stage_out(unit, std::move(staged));
  }
}

/// Returns the sums of each parameter, which all ranks add up. A parameter has one range in the part that
/// this rank owns at most.
std::vector<kernels::LambPart> ShardedOptimizer::lamb_totals() {
  const auto num_parameters = static_cast<int64_t>(layout_.parameters().size());
  at::Tensor norms;  // (parameters and one that takes what is another rank's to report, 2)
  for (const int index : step_->order) {
    ParamUnit& unit = units_[index];
    const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
    const InMemory updated(unit, kUpdated, InMemory::Access::kReadWrite);
    StagedUnit staged = stage_in(unit, Takes::kGradient);
    const std::vector<ParamRange> parts = ranges(unit, step_->used, /*by_parameter=*/true);
    if (!norms.defined())
      norms = at::zeros({num_parameters + 1, 2}, unit.master.options().dtype(at::kDouble));
    std::vector<int64_t> rows;
    for (const ParamRange& range : parts)
      rows.push_back(intersect(range.range, unit.owned_range).numel() > 0 ? range.parameter : num_parameters);
    kernels::lamb_norms(step_->grad_scale, updates_of(parts, staged), norms, rows);
    stage_out(unit, std::move(staged));
  }
  std::vector<kernels::LambPart> totals(static_cast<size_t>(num_parameters));
  if (!norms.defined()) return totals;
  const at::Tensor all = all_gather_owned(*comm_, device_, {norms.narrow(0, 0, num_parameters).view(-1)},
                                          units_.front().mesh, "LAMB norms");
  for (int part = 0; part < comm_->size(); ++part) {
    const double* next = all.const_data_ptr<double>() + part * all.size(1);
    for (kernels::LambPart& total : totals) {
      total.weight_sq += *next++;
      total.update_sq += *next++;
    }
  }
  return totals;
}

// ------------------------------------------------------------------------------- see [Note: Muon on shards]

bool ShardedOptimizer::steps_by_muon(const ParamUnit& unit) const {
  return std::ranges::any_of(unit.spec.parameters,
                             [this](int parameter) { return steps_by_muon(parameter); });
}

/// Where there are several ranks, all matrices are proposed before any is made orthogonal, so that ranks do
/// that at the same time.
void ShardedOptimizer::step_muon() {
  const OurOwnWork scope;
  const MemoryFor use(MemoryUse::kOptimizer);
  std::vector<kernels::Hyper> adam = step_->groups;
  for (kernels::Hyper& hyper : adam) hyper.lr *= hyper.adam_lr_ratio;
  const auto update = [&](std::span<const int> units) {
    std::vector<OwnedParameter> owned;
    for (const int unit : units) propose(units_[unit], owned);
    for (OwnedParameter& one : owned)
      one.values =
          orthogonalize(one.values, step_->groups[layout_.parameters()[one.parameter].group].ns_steps);
    for (const int unit : units) apply_muon(units_[unit], owned, adam);
  };
  const std::span<const int> order = step_->order;
  if (comm_->size() > 1) return update(order);
  for (size_t i = 0; i < order.size(); ++i) update(order.subspan(i, 1));
}

/// Collective. Updates the momentum of the unit's matrices, and adds to `owned` what it proposes for those
/// that this rank owns, in bf16.
void ShardedOptimizer::propose(ParamUnit& unit, std::vector<OwnedParameter>& owned) {
  if (!steps_by_muon(unit)) return;
  const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
  const InMemory updated(unit, kUpdated, InMemory::Access::kReadWrite);
  StagedUnit staged = stage_in(unit, Takes::kGradient);
  const Range local = unit.local_range();
  at::Tensor proposed = at::zeros({local.numel()}, unit.master.options().dtype(at::kBFloat16));
  for (const ParamRange& range : ranges(unit, step_->used, /*by_parameter=*/true)) {
    if (!steps_by_muon(range.parameter)) continue;
    const kernels::SegmentUpdate update = update_of(range, staged);
    const at::Tensor& momentum = update.segment.state[0];
    at::Tensor grad = scaled_gradient(update);
    momentum.lerp_(grad, 1 - update.hyper->momentum);
    if (update.hyper->nesterov) grad.lerp_(momentum, update.hyper->momentum);
    part_of(proposed, range).copy_(update.hyper->nesterov ? grad : momentum);
  }
  stage_out(unit, std::move(staged));
  if (unit.placement.updates_shard)
    proposed = proposed.narrow(0, unit.owned_range.begin - local.begin, unit.owned_range.numel());
  const at::Tensor full = gather_owned(unit, proposed, *comm_, "momentum");
  for (const int parameter : unit.spec.parameters) {
    if (!steps_by_muon(parameter) || owners_[parameter] != comm_->rank()) continue;
    const UnitSlice& slice = layout_.slice(parameter);
    const at::Tensor values = full.narrow(0, slice.offset, slice.numel);
    owned.push_back({parameter, values.view(layout_.parameters()[parameter].shape).clone()});
  }
}

/// Collective for a unit with matrices. `adam`: by group, with AdamW's rate.
void ShardedOptimizer::apply_muon(ParamUnit& unit, std::vector<OwnedParameter>& owned,
                                  const std::vector<kernels::Hyper>& adam) {
  at::Tensor orthogonal;
  if (steps_by_muon(unit))
    orthogonal = join_owned(unit, layout_, owned, at::kBFloat16, *comm_, "orthogonal updates");
  const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
  const InMemory updated(unit, kUpdated, InMemory::Access::kReadWrite);
  StagedUnit staged = stage_in(unit, Takes::kBoth);
  const std::vector<ParamRange> parts = ranges(unit, step_->used, /*by_parameter=*/true);
  std::vector<kernels::SegmentUpdate> by_adam;
  for (const ParamRange& range : parts) {
    kernels::SegmentUpdate update = update_of(range, staged);
    const ParameterSpec& parameter = layout_.parameters()[range.parameter];
    if (!steps_by_muon(range.parameter)) {
      update.hyper = &adam[parameter.group];
      by_adam.push_back(std::move(update));
      continue;
    }
    const kernels::Hyper& hyper = *update.hyper;
    const at::Tensor& master = update.segment.master;
    master.mul_(1 - hyper.lr * hyper.weight_decay);
    master.add_(orthogonal.narrow(0, range.range.begin, range.range.numel()).to(master.device()),
                -hyper.lr * muon_rate_factor(hyper.adjust_lr, parameter));
    if (update.segment.param.defined()) update.segment.param.copy_(master);
    copy_back(range, staged);
  }
  kernels::update(kernels::OptimizerKind::kAdamW, step_->grad_scale, by_adam);
  for (const ParamRange& range : parts)
    if (!steps_by_muon(range.parameter)) copy_back(range, staged);
  stage_out(unit, std::move(staged));
}

}  // namespace tessera::zero
