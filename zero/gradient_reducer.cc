#include "zero/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "core/check.h"
#include "core/error.h"
#include "core/memory_use.h"
#include "zero/gradient_hook.h"
#include "zero/operator_listener.h"

namespace tessera::zero {

GradientReducer::GradientReducer(const Layout& layout, std::vector<ParamUnit>& units,
                                 std::vector<at::Tensor> parameters, comm::CommunicatorPtr comm,
                                 const ReducerOptions& options)
    : layout_(layout),
      units_(units),
      parameters_(std::move(parameters)),
      comm_(std::move(comm)),
      options_(options),
      fired_(parameters_.size(), 0),
      expected_(parameters_.size(), 1),
      in_slot_(parameters_.size(), false),
      parts_(parameters_.size()),
      used_(parameters_.size(), false) {
  TESSERA_CHECK(options_.num_slots >= 1);
  const double world = comm_->size();
  prescale_ = options_.prescale ? 1 / world : 1 / options_.predivide_factor;
  postscale_ = options_.prescale ? 1 : options_.predivide_factor / world;
  slots_round_ = options_.communicate_dtype != options_.accumulate_dtype || prescale_ != 1;
  std::vector<int> order;
  bool gathers_on_use = false;
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    gathers_on_use |= unit->placement.sharded();
    if (unit->spec.trainable) order.push_back(unit->index);
  }
  queue_ = std::make_unique<ReductionQueue>(
      units_, std::move(order),
      ReductionQueue::Options{.rank = comm_->rank(),
                              .hooks_may_block = !gathers_on_use || !comm_->wait_blocks(),
                              .wait_limit = options_.hook_wait_limit,
                              .log = options_.log});
  if (this->order().empty()) return;
  const Placement& placement = units_[this->order().front()].placement;
  update_whole_ = !placement.updates_shard;
  if (placement.gradient_sharded || options_.reduce_each_micro_step) {
    way_ = Way::kReduceEachBackward;
  } else if (options_.accumulate_dtype != options_.communicate_dtype) {
    way_ = Way::kAccumulateThenCopy;
  }
  for (const int unit : this->order()) make_accumulator(units_[unit]);
  if (through_slots()) make_slots();
  reads_peers_ = update_whole_ && !through_slots() &&
                 comm_->peer_view(units_[this->order().front()].gradient.accumulator, 0).defined();
}

// Collective where the accumulator is reduced in place: other ranks then read it.
void GradientReducer::make_accumulator(ParamUnit& unit) {
  const at::TensorOptions like =
      unit.memory.full().options().dtype(options_.accumulate_dtype).requires_grad(false);
  const int64_t numel = unit.placement.gradient_sharded ? unit.shard_range.numel() : unit.spec.numel;
  const MemoryFor use(MemoryUse::kGradients);
  unit.gradient.accumulator =
      through_slots() ? at::zeros({numel}, like) : symmetric_zeros(*comm_, numel, like, unit.name);
  for (const int parameter : unit.spec.parameters) {
    parameters_[parameter].mutable_grad().reset();
    GradientHook::install(this, parameters_[parameter], [this, parameter] { on_gradient(parameter); });
  }
}

// Collective: all of them at once, because ranks come to their first use at different times.
void GradientReducer::make_slots() {
  const at::TensorOptions like =
      units_[order().front()].gradient.accumulator.options().dtype(options_.communicate_dtype);
  const MemoryFor use(MemoryUse::kCommunication);
  slots_.emplace(*comm_, numels_in_order(), options_.num_slots, like);
}

std::vector<int64_t> GradientReducer::numels_in_order() const {
  std::vector<int64_t> numels;
  for (const int unit : order()) numels.push_back(units_[unit].spec.numel);
  return numels;
}

GradientReducer::~GradientReducer() {
  for (const int unit : order())
    for (const int parameter : units_[unit].spec.parameters)
      GradientHook::remove(this, parameters_[parameter]);
}

void GradientReducer::begin_backward(bool first, bool boundary) {
  if (in_backward_)
    throw Error("the backward pass before this one failed half-way, and its gradients are lost");
  first_ = first;
  boundary_ = boundary;
  in_backward_ = true;
  if (all_have_read_) std::exchange(all_have_read_, nullptr)->wait();
  queue_->begin();
  std::fill(fired_.begin(), fired_.end(), 0);
  if (first) std::fill(used_.begin(), used_.end(), false);
  for (const int unit : order()) {
    units_[unit].gradient.num_missing = static_cast<int>(units_[unit].spec.parameters.size());
    units_[unit].gradient.late = false;  // what came late is still in p.grad, and goes with this micro-step
  }
}

// ------------------------------------------------------------------------------- gradients that come

/// A gradient that comes now has missed its unit's reduction.
bool GradientReducer::late(int parameter) const {
  const bool unexpected = slots_round_ && fired_[parameter] >= expected_[parameter];
  const int place = units_[layout_.slice(parameter).unit].gradient.place;
  return reducing() && (unexpected || place < queue_->num_issued());
}

void GradientReducer::on_gradient(int parameter) {
  if (!in_backward_) return;  // a backward of the user's own, e.g. torch::autograd::grad on the side
  if (check) check();
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  ParamUnit& unit = units_[layout_.slice(parameter).unit];
  used_[parameter] = true;
  if (late(parameter)) {
    ++fired_[parameter];
    unit.gradient.late = true;
    return;
  }
  if (way_ != Way::kReduceEachBackward) {
    accumulate(parameter);
  } else if (slots_round_) {
    take_part(parameter);
    if (fired_[parameter] + 1 == expected_[parameter] && claim_slot(unit, queue_->in_hook()))
      copy_into_slot(parameter);
  } else if (claim_slot(unit, queue_->in_hook())) {
    copy_into_slot(parameter);
  }
  if (++fired_[parameter] == expected_[parameter] && --unit.gradient.num_missing == 0) {
    if (!reducing()) return;
    if (!order_agreed_) finished_.push_back(unit.index);
    if (!issued_from_outside || !issued_from_outside()) issue_ready(/*at_end=*/false);
  }
  // Frees slots early; where ranks reduce in each other's memory (comm/shm), it is also this rank's part of
  // the work.
  while (queue_->in_flight() > 0 && complete_next(Wait::kNo)) {
  }
}

at::Tensor GradientReducer::take_grad(int parameter) {
  used_[parameter] = true;  // also one left in p.grad by a backward of the user's own
  at::Tensor grad = std::exchange(parameters_[parameter].mutable_grad(), at::Tensor());
  return (grad.is_sparse() ? grad.to_dense() : grad).reshape(-1);
}

void GradientReducer::accumulate(int parameter) {
  const UnitSlice& slice = layout_.slice(parameter);
  const at::Tensor target = units_[slice.unit].gradient.accumulator.narrow(0, slice.offset, slice.numel);
  const at::Tensor grad = take_grad(parameter);
  if (first_ && fired_[parameter] == 0) {
    target.copy_(grad);
  } else {
    target.add_(grad);
  }
}

/// [Note: gradients in parts]
void GradientReducer::take_part(int parameter) {
  const at::Tensor grad = take_grad(parameter);
  at::Tensor& sum = parts_[parameter];
  if (sum.defined()) {
    sum.add_(grad);
  } else {
    sum = expected_[parameter] == 1
              ? grad
              : grad.to(options_.accumulate_dtype, /*non_blocking=*/false, /*copy=*/true);
  }
}

bool GradientReducer::claim_slot(ParamUnit& unit, Wait wait) {
  if (unit.gradient.in_slot) return true;
  const int before = slots_->last_overlapping(unit.gradient.place);
  if (before >= queue_->num_issued()) return false;  // the unit that has the slot cannot be reduced yet
  while (before >= queue_->num_completed()) {
    if (queue_->in_flight() == 0 || !complete_next(wait)) return false;
  }
  unit.gradient.in_slot = true;
  return true;
}

void GradientReducer::free_slot(ParamUnit& unit) {
  unit.gradient.in_slot = false;
  for (const int parameter : unit.spec.parameters) in_slot_[parameter] = false;
}

void GradientReducer::copy_into_slot(int parameter) {
  const UnitSlice& slice = layout_.slice(parameter);
  const at::Tensor target = slot_of(units_[slice.unit]).narrow(0, slice.offset, slice.numel);
  const at::Tensor grad =
      parts_[parameter].defined() ? std::exchange(parts_[parameter], at::Tensor()) : take_grad(parameter);
  if (in_slot_[parameter]) {
    target.add_(grad, prescale_);
  } else {
    target.copy_(grad);
    if (prescale_ != 1) target.mul_(prescale_);
  }
  in_slot_[parameter] = true;
}

void GradientReducer::copy_rest_into_slot(const ParamUnit& unit) {
  for (const int parameter : unit.spec.parameters)
    if (parts_[parameter].defined() || has_grad(parameter)) copy_into_slot(parameter);
}

/// In p.grad, for the unit's reduction that is about to be issued; what came late waits there for
/// reduce_late().
bool GradientReducer::has_grad(int parameter) const {
  const bool came_late = in_backward_ && slots_round_ && fired_[parameter] > expected_[parameter];
  return parameters_[parameter].grad().defined() && !came_late;
}

/// `came`: by parameter. Zeroes the gaps between parameters too: slots are shared by units of other shapes.
void GradientReducer::zero_missing(const at::Tensor& flat, const ParamUnit& unit,
                                   const std::vector<bool>& came) {
  int64_t end = 0;
  const auto zero_up_to = [&](int64_t begin) {
    if (begin > end) flat.narrow(0, end, begin - end).zero_();
  };
  for (const int parameter : unit.spec.parameters) {
    if (!came[parameter]) continue;
    zero_up_to(layout_.slice(parameter).offset);
    end = layout_.slice(parameter).range().end;
  }
  zero_up_to(flat.numel());
}

// ---------------------------------------------------------------------------------------- reductions

void GradientReducer::issue_ready(bool at_end) {
  while (!queue_->all_issued()) {
    if (!at_end && queue_->next().gradient.num_missing > 0) return;
    if (!issue_next(at_end ? Wait::kUntilDone : queue_->in_hook())) return;
  }
}

/// False when that takes a wait which `wait` does not allow.
bool GradientReducer::issue_next(Wait wait) {
  ParamUnit& unit = queue_->next();
  if (through_slots() && !claim_slot(unit, wait)) return false;
  if (!has_room(wait)) return false;
  issue(unit);
  queue_->issued();
  if (!options_.overlap) complete_next(wait);
  return true;
}

int GradientReducer::num_ready() const {
  if (!in_backward_) return 0;
  return order_agreed_ ? queue_->num_ready() : static_cast<int>(finished_.size());
}

void GradientReducer::issue_until(int count) {
  if (!in_backward_ || !reducing()) return;
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  while (queue_->num_issued() < count) TESSERA_CHECK(issue_next(Wait::kUntilDone));
}

/// Slots bound what is under way; where there are none, and the transport has buffers instead, this does.
bool GradientReducer::has_room(Wait wait) {
  // An all-reduce is in place.
  if (through_slots() || update_whole_ || !comm_->buffers_reductions()) return true;
  while (queue_->in_flight() >= options_.num_slots)
    if (!complete_next(wait)) return false;
  return true;
}

/// (numel) what is to be reduced.
at::Tensor GradientReducer::prepare_buffer(ParamUnit& unit) {
  if (way_ == Way::kReduceEachBackward) {
    copy_rest_into_slot(unit);
    const at::Tensor slot = slot_of(unit);
    zero_missing(slot, unit, in_slot_);
    return slot;
  }
  for (const int parameter : unit.spec.parameters)
    if (has_grad(parameter)) accumulate(parameter);
  if (first_) zero_missing(unit.gradient.accumulator, unit, used_);
  at::Tensor flat = unit.gradient.accumulator;
  if (through_slots()) {
    flat = slot_of(unit);
    flat.copy_(unit.gradient.accumulator);
  }
  if (prescale_ != 1) flat.mul_(prescale_);
  return flat;
}

void GradientReducer::issue(ParamUnit& unit) {
  const at::Tensor flat = prepare_buffer(unit);
  const bool add = way_ == Way::kReduceEachBackward && !first_;
  unit.gradient.reduction = update_whole_ && !through_slots() && !reads_peers_
                                ? comm_->all_reduce(flat, unit.name, postscale_)
                                : comm_->reduce_scatter(flat, {shard(unit), postscale_, add}, unit.name);
}

bool GradientReducer::complete_next(Wait wait) {
  ParamUnit* const unit = queue_->complete_next(wait);
  if (unit == nullptr) return false;
  free_slot(*unit);
  return true;
}

/// Collective. What was reduced through slots is here in this rank's shard only; stage 0 wants all of it.
void GradientReducer::gather_results() {
  if (!update_whole_ || !through_slots() || !boundary_) return;
  for (const int unit : order())
    units_[unit].gradient.reduction =
        comm_->all_gather(units_[unit].gradient.accumulator, shard(units_[unit]), units_[unit].name);
  for (const int unit : order()) std::exchange(units_[unit].gradient.reduction, nullptr)->wait();
}

void GradientReducer::finish_backward() {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(in_backward_);
  if (before_waiting) before_waiting();
  if (reducing()) {
    issue_ready(/*at_end=*/true);
    while (queue_->in_flight() > 0) complete_next(Wait::kUntilDone);
    gather_results();
    if (!order_agreed_) agree_on_order();
  } else if (first_) {
    for (const int unit : order()) zero_missing(units_[unit].gradient.accumulator, units_[unit], used_);
  }
  in_backward_ = false;
}

void GradientReducer::agree_on_order() {
  for (const int unit : order())
    if (std::find(finished_.begin(), finished_.end(), unit) == finished_.end()) finished_.push_back(unit);
  std::vector<int> order = comm_->exchange(finished_, "order of gradient reduction").front();
  queue_->set_order(std::move(order));
  if (slots_) slots_->arrange(numels_in_order());
  for (size_t parameter = 0; parameter < expected_.size(); ++parameter)
    expected_[parameter] = std::max(1, fired_[parameter]);
  order_agreed_ = true;
}

std::vector<bool> GradientReducer::late_units() const {
  std::vector<bool> late;
  for (const ParamUnit& unit : units_) late.push_back(unit.gradient.late);
  return late;
}

void GradientReducer::reduce_late(const std::vector<int>& units) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  if (!slots_) make_slots();
  for (const int index : units) {
    ParamUnit& unit = units_[index];
    copy_rest_into_slot(unit);
    const at::Tensor flat = slot_of(unit);
    zero_missing(flat, unit, in_slot_);
    comm_->reduce_scatter(flat, {shard(unit), postscale_, /*add=*/true}, unit.name)->wait();
    if (update_whole_) comm_->all_gather(unit.gradient.accumulator, shard(unit), unit.name)->wait();
    unit.gradient.late = false;
    free_slot(unit);
  }
}

// ------------------------------------------------------------------------------------------- the sum

at::Tensor GradientReducer::shard(const ParamUnit& unit) const {
  const at::Tensor& accumulator = unit.gradient.accumulator;
  if (unit.placement.gradient_sharded) return accumulator;
  return accumulator.narrow(0, unit.shard_range.begin, unit.shard_range.numel());
}

at::Tensor GradientReducer::reduced(const ParamUnit& unit, Range range) const {
  const at::Tensor& accumulator = unit.gradient.accumulator;
  if (unit.placement.gradient_sharded)
    return accumulator.narrow(0, range.begin - unit.shard_range.begin, range.numel());
  const at::Tensor mine = accumulator.narrow(0, range.begin, range.numel());
  const int owner = static_cast<int>(range.begin / unit.shard_range.numel());
  return reads_peers_ && owner != comm_->rank() ? comm_->peer_view(mine, owner) : mine;
}

void GradientReducer::done_reading() {
  if (!reads_peers_) return;
  const at::Tensor token = at::zeros({1}, units_[order().front()].gradient.accumulator.options());
  all_have_read_ = comm_->all_reduce(token, "gradients have been read");
}

}  // namespace tessera::zero
