#include "zero/reduce/gradient_reducer.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/zeros.h>

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/memory/allocation_failure.h"
#include "core/memory/memory_use.h"
#include "core/str.h"
#include "zero/kernels/kernels.h"
#include "zero/memory/pause_listening.h"
#include "zero/plan/gradient_slots.h"
#include "zero/reduce/gradient_hook.h"

namespace tessera::zero {

constexpr int kFirstPassesWithoutWaits = 8;

/// Collective. (numel) zeros in memory that the other ranks can read, where there is such memory
/// (Communicator::allocate_symmetric).
static at::Tensor symmetric_zeros(comm::Communicator& comm, int64_t numel, const at::TensorOptions& like,
                                  const std::string& label) {
  const int64_t bytes = numel * static_cast<int64_t>(like.dtype().itemsize());
  return comm.allocate_symmetric(bytes, like.device(), label).view(like.dtype().toScalarType()).zero_();
}

/// Collective. Every rank gets the same bits.
static void sum_over(comm::Communicator& comm, const at::Tensor& flat, const std::string& label) {
  comm.reduce_scatter(flat, label)->wait();
  const int64_t numel = flat.numel() / comm.size();
  comm.all_gather(flat, flat.narrow(0, comm.rank() * numel, numel), label)->wait();
}

static int num_ranks(const comm::Communicator& comm, const ReducerOptions& options) {
  return comm.size() * (options.replicas ? options.replicas->size() : 1);
}

std::vector<int> first_order_of_reductions(const std::vector<ParamUnit>& units) {
  std::vector<int> order;
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit)
    if (unit->spec.trainable) order.push_back(unit->index);
  return order;
}

GradientReducer::GradientReducer(const Layout& layout, std::vector<ParamUnit>& units,
                                 std::vector<at::Tensor> parameters, ReductionOrder& order,
                                 Residency* residency, comm::CommunicatorPtr comm,
                                 const ReducerOptions& options)
    : layout_(layout),
      units_(units),
      order_(order),
      residency_(residency),
      comm_(std::move(comm)),
      options_(options),
      prescale_(options.sum        ? 1
                : options.prescale ? 1.0 / num_ranks(*comm_, options)
                                   : 1 / options.predivide_factor),
      postscale_(options.sum || options.prescale ? 1 : options.predivide_factor / num_ranks(*comm_, options)),
      shard_group_scale_(options.replicas ? 1 : postscale_),
      mode_(choose_mode()),
      single_rank_(mode_ == ReductionMode::kSingleRank),
      streams_(device_of(units)),
      next_passes_without_waits_(kFirstPassesWithoutWaits) {
  TESSERA_CHECK(options_.num_slots >= 1);
  for (at::Tensor& parameter : parameters) gradients_.push_back({.parameter = std::move(parameter)});
  hooks_may_block_ = !any_sharded(units_) || !comm_->wait_blocks();
  const std::vector<int>& reduced = order_.units();
  if (reduced.empty()) return;
  ParamUnit& first = units_[reduced.front()];
  const Placement& placement = first.placement;  // that of all trainable units
  for (const int unit : reduced) TESSERA_CHECK(units_[unit].placement == placement);
  update_whole_ = !placement.updates_shard;
  if (options_.replicas) {
    // Where a transport reads the accumulators in place, they have to be memory of the one group.
    const bool apart = comm_->wait_blocks() && options_.replicas->buffers_reductions();
    sum_gather_comm_ = apart ? options_.replicas->duplicate("sums") : options_.replicas;
  }
  TESSERA_CHECK(!options_.replicas || (placement.gradient_sharded && placement.gradient == Tier::kDevice));
  for (const int unit : reduced) make_accumulator(units_[unit]);
  if (through_slots()) make_slots();
  if (placement.gradient != Tier::kDevice) norms_ = zero_norms();
  if (placement.on_host(placement.gradient))
    on_device_.emplace(
        BufferPool::Options{.device = device_of(units_), .max_free = 3, .transfer = options_.transfer});
  reads_peers_ =
      update_whole_ && !through_slots() && comm_->peer_view(first.gradient.accumulator, 0).defined();
  install_hooks();  // last: the destructor removes them, which does not run for a constructor that throws
}

ReductionMode GradientReducer::choose_mode() const {
  const auto trainable = std::ranges::find_if(units_, [](const auto& unit) { return unit.spec.trainable; });
  if (trainable == units_.end()) return ReductionMode::kAccumulateInPlace;
  return reduction_mode(trainable->placement, options_.reduce_each_micro_step,
                        options_.accumulate_dtype == options_.communicate_dtype,
                        comm_->size() == 1 && !options_.replicas && prescale_ == 1 && postscale_ == 1);
}

// Collective where the accumulator is reduced in place: other ranks then read it.
void GradientReducer::make_accumulator(ParamUnit& unit) {
  const at::TensorOptions like =
      unit.memory.full().options().dtype(options_.accumulate_dtype).requires_grad(false);
  const int64_t numel = unit.placement.gradient_sharded ? unit.shard_range.numel() : unit.spec.numel;
  const MemoryForUnit for_it(unit.name);
  const MemoryFor use(MemoryUse::kGradients);
  unit.gradient.accumulator =
      through_slots() ? options_.replicas
                            ? symmetric_zeros(*options_.replicas, numel, like, unit.name)
                            : unit.make(kGradient, numel, options_.accumulate_dtype, "the gradient")
                      : symmetric_zeros(*comm_, numel, like, unit.name);
}

void GradientReducer::install_hooks() {
  for (const int unit : order_.units())
    for (const int parameter : units_[unit].spec.parameters) {
      const at::Tensor& tensor = gradients_[parameter].parameter;
      if (GradientHook::is_installed(this, tensor)) continue;
      GradientHook::install(this, tensor, [this, parameter] { on_gradient(parameter); });
    }
}

/// The units' sizes, by the order of reductions.
static std::vector<int64_t> numels_in_order(const std::vector<ParamUnit>& units,
                                            const ReductionOrder& order) {
  std::vector<int64_t> numels;
  for (const int unit : order.units()) numels.push_back(units[unit].spec.numel);
  return numels;
}

// Collective: all of them at once, because ranks come to their first use at different times.
void GradientReducer::make_slots() {
  const MemoryFor use(MemoryUse::kCommunication);
  // On the device, also where accumulators are on the host.
  const at::TensorOptions like = units_.front().memory.full().options().requires_grad(false);
  slots_ = symmetric_zeros(*comm_, gradient_buffer_numel(numels_in_order(units_, order_), options_.num_slots),
                           like.dtype(options_.communicate_dtype), "gradient buffer");
  arrange();
}

/// The units' slots, by the order of reductions. No slot may be in use.
void GradientReducer::arrange() {
  const std::vector<int>& order = order_.units();
  const std::vector<GradientSlot> slots = arrange_slots(numels_in_order(units_, order_), slots_.numel());
  for (size_t place = 0; place < order.size(); ++place) units_[order[place]].gradient.slot = slots[place];
}

GradientReducer::~GradientReducer() {
  for (const int unit : order_.units())
    for (const int parameter : units_[unit].spec.parameters)
      GradientHook::remove(this, gradients_[parameter].parameter);
}

// ------------------------------------------------------------------------------------------ a backward

void GradientReducer::begin_backward(bool first, bool boundary, double factor) {
  if (order_.in_backward())
    throw Error("the backward pass before this one failed half-way, and its gradients are lost");
  install_hooks();
  first_ = first;
  boundary_ = boundary;
  factor_ = factor;
  for (ParameterGradient& gradient : gradients_) {
    gradient.came = 0;
    gradient.in_accumulator = !first;
    if (first) {
      gradient.used = false;
      gradient.taken = at::Tensor();  // of a step that was given up
    }
  }
  for (ParamUnit& unit : units_) {
    unit.gradient.num_missing = static_cast<int>(unit.spec.parameters.size());
    unit.gradient.taken = false;
    unit.gradient.late = false;  // what came late has been taken, and goes with this micro-step
  }
  if (all_have_read_) std::exchange(all_have_read_, nullptr)->wait();
  sums_.clear();
  sum_gathers_.clear();
  order_.begin_backward();
  if (passes_without_waits_ > 0) --passes_without_waits_;
}

void GradientReducer::finish_backward() {
  const OurOwnWork scope;
  TESSERA_CHECK(order_.in_backward());
  streams_.follow();
  if (reducing()) {
    complete_all();
    if (!order_.agreed()) agree_on_order();
  } else {
    for (const int unit : order_.units()) complete_accumulator(units_[unit]);
  }
  order_.end_backward();
  // Nothing of the engine's stays in p.grad between backward passes, where the caller reads and resets it.
  for (ParamUnit& unit : units_)
    if (unit.gradient.late) take(unit);
}

void GradientReducer::drop_backward() {
  const OurOwnWork scope;
  TESSERA_CHECK(order_.in_backward());
  if (reducing()) complete_all();
  order_.drop_backward();
}

void GradientReducer::drop() {
  for (const int unit : order_.units())
    for (const int parameter : units_[unit].spec.parameters)
      gradients_[parameter].parameter.mutable_grad().reset();
  for (ParameterGradient& gradient : gradients_) {
    gradient.taken = at::Tensor();
    gradient.used = false;
  }
  for (ParamUnit& unit : units_) unit.gradient.late = false;
}

/// Collective. Issues and waits for what is left.
void GradientReducer::complete_all() {
  issue_ready(/*at_end=*/true);
  while (order_.in_flight() > 0) complete_next(Wait::kUntilDone);
  gather_results();
  sum_over_replicas();
}

void GradientReducer::agree_on_order() {
  std::vector<int> order = comm_->exchange(order_.completion_order(), "order of gradient reduction").front();
  if (options_.replicas) order = options_.replicas->exchange(order, "order of gradient reduction").front();
  order_.agree(std::move(order));
  if (slots_.defined()) arrange();
  for (ParameterGradient& gradient : gradients_) gradient.expected = std::max(1, gradient.came);
}

// ------------------------------------------------------------------------------- gradients that come

void GradientReducer::on_gradient(int parameter) {
  if (!order_.in_backward() && options_.on_gradient_outside) options_.on_gradient_outside();
  if (!order_.in_backward()) return;
  if (residency_ != nullptr) residency_->rethrow();
  ParameterGradient& gradient = gradients_[parameter];
  if (!gradient.parameter.grad().defined()) return;  // a hook that ran before has freed it
  const OurOwnWork scope;
  streams_.follow();
  gradient.used = true;
  ++gradient.came;
  UnitGradient& unit = unit_of(parameter).gradient;
  if (unit.taken) {
    unit.late = reducing();
    return;
  }
  if (gradient.came == gradient.expected && --unit.num_missing == 0) complete(unit_of(parameter));
  // Frees slots early; where ranks reduce in each other's memory (comm/shm/shm), it is also this rank's part
  // of the work.
  while (order_.in_flight() > 0 && complete_next(Wait::kNo)) {
  }
}

/// The unit has all gradients that are expected.
void GradientReducer::complete(ParamUnit& unit) {
  take(unit);
  if (mode_ != ReductionMode::kReduceEachBackward) accumulate(unit);
  if (!reducing()) return;
  order_.gradient_complete(unit.index);
  if (residency_ == nullptr || !residency_->reductions_have_places()) issue_ready(/*at_end=*/false);
}

std::vector<bool> GradientReducer::used() const {
  std::vector<bool> used;
  for (const ParameterGradient& gradient : gradients_) used.push_back(gradient.used);
  return used;
}

// ------------------------------------------------------------------------------- from p.grad to the unit

/// Takes what is there of the unit's gradients out of p.grad.
void GradientReducer::take(ParamUnit& unit) {
  unit.gradient.taken = true;
  for (const int parameter : unit.spec.parameters) {
    ParameterGradient& gradient = gradients_[parameter];
    if (!gradient.parameter.grad().defined()) continue;
    const at::Tensor grad = take_grad(gradient), late = gradient.taken;  // of the micro-step before
    gradient.taken = late.defined() ? late.to(options_.accumulate_dtype).add(grad) : grad;
  }
}

at::Tensor GradientReducer::take_grad(ParameterGradient& gradient) {
  gradient.used = true;  // also one left in p.grad by a backward of the user's own
  at::Tensor grad = std::exchange(gradient.parameter.mutable_grad(), at::Tensor());
  streams_.uses(grad);  // one that stayed there may be of another stream
  if (factor_ != 1) {
    // Its memory may be another gradient's, too (of parameters that are added, one of them as a view), or
    // that of a tensor which a hook has kept.
    const bool is_shared = !grad.is_sparse() && grad.storage().use_count() > 1;
    grad = at::isReducedFloatingType(grad.scalar_type()) ? grad.to(at::kFloat).mul_(factor_)
           : is_shared                                   ? grad.mul(factor_)
                                                         : grad.mul_(factor_);
  }
  return (grad.is_sparse() ? grad.to_dense() : grad).reshape(-1);
}

/// (numel) The slot gets what has been taken of the unit's gradients, and zeros for the others.
void GradientReducer::fill_slot(const ParamUnit& unit, const at::Tensor& slot) {
  zero_all_but(slot, unit, [](const ParameterGradient& gradient) { return gradient.taken.defined(); });
  std::vector<at::Tensor> places, grads;
  for (const int parameter : unit.spec.parameters) {
    if (!gradients_[parameter].taken.defined()) continue;
    places.push_back(part_of(slot, parameter));
    grads.push_back(give_out(parameter));
  }
  if (!grads.empty()) at::_foreach_copy_(places, grads);
  if (prescale_ != 1) slot.mul_(prescale_);
}

/// Adds what has been taken of the unit's gradients to the accumulator, which may start anew with it.
void GradientReducer::accumulate(const ParamUnit& unit) {
  struct {
    std::vector<at::Tensor> places, grads;
  } copied, added;
  for (const int parameter : unit.spec.parameters) {
    ParameterGradient& gradient = gradients_[parameter];
    if (!gradient.taken.defined()) continue;
    auto& [places, grads] = gradient.in_accumulator ? added : copied;
    places.push_back(part_of(unit.gradient.accumulator, parameter));
    grads.push_back(rounded_as_in_slot(give_out(parameter)));
    gradient.in_accumulator = true;
  }
  if (!copied.grads.empty()) at::_foreach_copy_(copied.places, copied.grads);
  if (!added.grads.empty()) at::_foreach_add_(added.places, added.grads);
}

/// What has been taken of the parameter's gradient, to be copied in.
at::Tensor GradientReducer::give_out(int parameter) {
  streams_.uses(gradients_[parameter].taken);
  return std::exchange(gradients_[parameter].taken, at::Tensor());
}

/// Rounds the gradient as the slot does: what is added to an accumulator of a wider type would otherwise be
/// rounded only with the sum.
at::Tensor GradientReducer::rounded_as_in_slot(const at::Tensor& grad) const {
  if (!single_rank_) return grad;
  const at::ScalarType dtype = options_.communicate_dtype;
  return c10::promoteTypes(grad.scalar_type(), dtype) == dtype ? grad : grad.to(dtype);
}

/// Nothing comes after it but what is late. What has had no gradient since the accumulator started anew is
/// zero.
void GradientReducer::complete_accumulator(ParamUnit& unit) {
  if (!unit.gradient.taken || !reducing()) take(unit);
  accumulate(unit);
  if (first_)
    zero_all_but(unit.gradient.accumulator, unit,
                 [](const ParameterGradient& gradient) { return gradient.in_accumulator; });
}

/// Zeroes the gaps between parameters too: slots are shared by units of other shapes.
template <class Keeps>
void GradientReducer::zero_all_but(const at::Tensor& flat, const ParamUnit& unit, const Keeps& keeps) const {
  int64_t end = 0;
  const auto zero_up_to = [&](int64_t begin) {
    if (begin > end) flat.narrow(0, end, begin - end).zero_();
  };
  for (const int parameter : unit.spec.parameters) {
    if (!keeps(gradients_[parameter])) continue;
    zero_up_to(layout_.slice(parameter).offset);
    end = layout_.slice(parameter).range().end;
  }
  zero_up_to(flat.numel());
}

/// Of `flat`, (numel) of the parameter's unit.
at::Tensor GradientReducer::part_of(const at::Tensor& flat, int parameter) const {
  const UnitSlice& slice = layout_.slice(parameter);
  return flat.narrow(0, slice.offset, slice.numel);
}

/// Of the unit whose reduction is issued next. False when that takes a wait which `wait` does not allow.
bool GradientReducer::wait_for_slot(const ParamUnit& unit, Wait wait) {
  while (unit.gradient.slot.last_overlapping >= order_.num_completed())
    if (!complete_next(wait)) return false;
  return true;
}

at::Tensor GradientReducer::slot_of(const ParamUnit& unit) const {
  const GradientSlot& slot = unit.gradient.slot;
  return slots_.narrow(0, slot.offset, slot.numel);
}

// ---------------------------------------------------------------------------------------- reductions

void GradientReducer::issue_ready(bool at_end) {
  while (!order_.all_issued()) {
    if (!at_end && !order_.next_is_complete()) return;
    if (!issue_next(at_end ? Wait::kUntilDone : in_hook())) return;
  }
}

void GradientReducer::issue_until(int count) {
  // Rank 0 had gradients at this place: so this is a backward, also if none has come here.
  if (count > 0 && !order_.in_backward() && options_.on_gradient_outside) options_.on_gradient_outside();
  if (!order_.in_backward() || !reducing()) return;
  const OurOwnWork scope;
  while (order_.num_issued() < count) TESSERA_CHECK(issue_next(Wait::kUntilDone));
}

/// False when that takes a wait which `wait` does not allow.
bool GradientReducer::issue_next(Wait wait) {
  ParamUnit& unit = units_[order_.next()];
  if (through_slots() && !wait_for_slot(unit, wait)) return false;
  if (!has_room(wait)) return false;
  issue(unit);
  order_.issued();
  if (on_device_ && !first_ && !order_.all_issued()) bring_accumulator(units_[order_.next()], true);
  if (!options_.overlap) complete_next(wait);
  return true;
}

/// Slots bound what is under way; where there are none, and the transport has buffers instead, this does.
bool GradientReducer::has_room(Wait wait) {
  // An all-reduce is in place.
  if (through_slots() || update_whole_ || !comm_->buffers_reductions()) return true;
  while (order_.in_flight() >= options_.num_slots)
    if (!complete_next(wait)) return false;
  return true;
}

/// (numel) what is to be reduced.
at::Tensor GradientReducer::prepare_buffer(ParamUnit& unit) {
  if (mode_ == ReductionMode::kReduceEachBackward) {
    if (!unit.gradient.taken) take(unit);
    fill_slot(unit, slot_of(unit));
    return slot_of(unit);
  }
  complete_accumulator(unit);
  at::Tensor flat = unit.gradient.accumulator;
  if (through_slots()) {
    flat = slot_of(unit);
    flat.copy_(unit.gradient.accumulator);
  }
  if (prescale_ != 1) flat.mul_(prescale_);
  return flat;
}

void GradientReducer::issue(ParamUnit& unit) {
  streams_.follow();
  const at::Tensor flat = prepare_buffer(unit);
  const bool add = mode_ == ReductionMode::kReduceEachBackward && !first_;
  const at::Tensor sum = sum_goes_to(unit, add);
  unit.gradient.reduction = update_whole_ && !through_slots() && !reads_peers_
                                ? comm_->all_reduce(flat, unit.name, postscale_)
                                : comm_->reduce_scatter(flat, {sum, shard_group_scale_, add}, unit.name);
}

/// (shard numel) for the reduction that is issued next, on the device. What it adds to is there.
at::Tensor GradientReducer::sum_goes_to(ParamUnit& unit, bool add) {
  bring_accumulator(unit, add);
  if (!on_device_) return shard(unit);
  options_.transfer->wait(unit.gradient.on_device.free);
  return sum_on_device(unit);
}

at::Tensor GradientReducer::sum_on_device(const ParamUnit& unit) const {
  return unit.gradient.on_device.view(unit.shard_range.numel(), options_.accumulate_dtype);
}

/// Begins to bring what the sum is added to to the device, ahead of the unit's reduction.
void GradientReducer::bring_accumulator(ParamUnit& unit, bool add) {
  BufferPool::Buffer& buffer = unit.gradient.on_device;
  if (buffer.memory.defined()) return;
  unit.acquire(kGradient, add ? InMemory::Access::kReadWrite : InMemory::Access::kOverwrite);
  if (!on_device_) return;
  buffer = on_device_->acquire(static_cast<int64_t>(shard(unit).nbytes()));
  if (!add) return;
  unit.wait_for_gradient();  // of the micro-step before
  // Memory that was allocated just now may still be used by what the current stream was given before.
  if (!buffer.free) buffer.free = options_.transfer->record();
  buffer.free = options_.transfer->h2d(sum_on_device(unit), shard(unit), buffer.free);
}

/// Returns how a hook waits now.
GradientReducer::Wait GradientReducer::in_hook() const {
  if (hooks_may_block_) return Wait::kUntilDone;
  return waits_in_hooks() ? Wait::kLimited : Wait::kNo;
}

/// Waits for the oldest reduction in flight. False when that takes a wait which `wait` does not allow.
bool GradientReducer::complete_next(Wait wait) {
  ParamUnit& unit = units_[order_.oldest()];
  comm::WorkPtr& reduction = unit.gradient.reduction;
  if (wait == Wait::kNo && !reduction->test()) return false;
  if (wait == Wait::kLimited && !arrives_within_limit(unit)) return false;
  reduction->wait();
  reduction.reset();
  order_.completed();
  leave_memory(unit);
  // Elsewhere the order relative to the shard group's operations is not free: [Note: one order on a device]
  // in collective_order.h.
  if (options_.overlap && comm_->wait_blocks()) issue_sums(/*at_end=*/false);
  return true;
}

bool GradientReducer::arrives_within_limit(const ParamUnit& unit) {
  using std::chrono::microseconds;
  const auto deadline = std::chrono::steady_clock::now() + options_.hook_wait_limit;
  for (microseconds pause(10); !unit.gradient.reduction->test();
       pause = std::min(pause * 2, microseconds(500))) {
    if (std::chrono::steady_clock::now() > deadline) {
      const bool first_time = next_passes_without_waits_ == kFirstPassesWithoutWaits;
      passes_without_waits_ = next_passes_without_waits_;
      next_passes_without_waits_ = std::min(next_passes_without_waits_ * 2, 1 << 20);
      if (first_time)
        options_.log.warning(str(
            "rank ", comm_->global_rank(comm_->rank()), " waited ", options_.hook_wait_limit.count() / 1000.0,
            " s during backward for the gradients of ", unit.name,
            ": the ranks seem to use different parameters. Results don't change, but gradients "
            "then wait in memory that stage 3 does not bound"));
      return false;
    }
    std::this_thread::sleep_for(pause);
  }
  return true;
}

/// The gradient has been reduced. What is wanted of it before the update is taken now, where it leaves the
/// device or the memory.
void GradientReducer::leave_memory(ParamUnit& unit) {
  if (unit.placement.gradient == Tier::kDevice) return;
  UnitGradient& gradient = unit.gradient;
  const at::Tensor sum = on_device_ ? sum_on_device(unit) : shard(unit);
  if (boundary_) kernels::squared_norms({sum}, norms_, {unit.index});
  if (!on_device_) return unit.release(kGradient);
  gradient.arrival = options_.transfer->d2h(shard(unit), sum, options_.transfer->record());
  gradient.on_device.free = gradient.arrival;
  on_device_->give_back(std::exchange(gradient.on_device, {}));
  if (!unit.is_on_disk(kGradient)) return;
  options_.host->post([&unit, transfer = options_.transfer, arrival = gradient.arrival] {
    transfer->synchronize(arrival);
    unit.release(kGradient);
  });
}

/// Collective. Whether a rank has a gradient of the unit that is still to be reduced.
bool GradientReducer::late_on_some_rank(const ParamUnit& unit) {
  const auto on_some = [](comm::Communicator& comm, int mine) {
    return std::ranges::count(comm.exchange(mine, "late gradients"), 1) > 0 ? 1 : 0;
  };
  const int late = on_some(*comm_, unit.gradient.late ? 1 : 0);
  return (options_.replicas ? on_some(*options_.replicas, late) : late) != 0;
}

at::Tensor GradientReducer::mean_so_far(ParamUnit& unit) {
  if (late_on_some_rank(unit)) reduce_late({unit.index});
  if (boundary_) return mean_at_boundary(unit);
  if (!each_backward()) {
    at::Tensor sum = unit.gradient.accumulator.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    comm_->all_reduce(sum, unit.name, prescale_ * postscale_)->wait();
    return sum;
  }
  if (!options_.replicas) return owned(unit);
  const at::Tensor sum = shard(unit).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  options_.replicas->all_reduce(sum, unit.name, postscale_)->wait();
  return sum.narrow(0, unit.owned_range.begin - unit.shard_range.begin, unit.owned_range.numel());
}

at::Tensor GradientReducer::mean_at_boundary(const ParamUnit& unit) const {
  return update_whole_ && !reads_peers_ ? unit.gradient.accumulator : owned(unit);
}

void GradientReducer::set(int parameter, const at::Tensor& value) {
  const OurOwnWork scope;
  ParamUnit& unit = unit_of(parameter);
  const InMemory gradient(unit, kGradient, InMemory::Access::kReadWrite);
  if (late_on_some_rank(unit)) reduce_late({unit.index});  // what still lies in p.grad is replaced, too
  const Range held = unit.placement.gradient_sharded ? unit.shard_range : Range{0, unit.spec.numel};
  copy_part(unit.gradient.accumulator, held, layout_.slice(parameter), value);
  gradients_[parameter].used = true;
  if (norms_.defined()) kernels::squared_norms({shard(unit).to(norms_.device())}, norms_, {unit.index});
}

at::Tensor GradientReducer::norms() const {
  if (norms_.defined()) return norms_;
  const at::Tensor sums = zero_norms();
  std::vector<at::Tensor> owned_sums;
  std::vector<int64_t> indices;
  for (const ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    owned_sums.push_back(owned(unit));
    indices.push_back(unit.index);
  }
  kernels::squared_norms(owned_sums, sums, indices);
  return sums;
}

at::Tensor GradientReducer::zero_norms() const {
  const at::TensorOptions on_device = units_.front().memory.full().options().requires_grad(false);
  return at::zeros({static_cast<int64_t>(units_.size()), 2}, on_device.dtype(at::kDouble));
}

/// Collective. What was reduced through slots is here in this rank's shard only; stage 0 wants all of it.
void GradientReducer::gather_results() {
  if (!update_whole_ || !through_slots() || !boundary_) return;
  for (const int unit : order_.units())
    units_[unit].gradient.reduction =
        comm_->all_gather(units_[unit].gradient.accumulator, shard(units_[unit]), units_[unit].name);
  for (const int unit : order_.units()) std::exchange(units_[unit].gradient.reduction, nullptr)->wait();
}

// Sums over the replicas: [Note: hybrid sharding] in mesh.h.

/// Issues the sums over the replicas of those units whose reduction in the shard group is complete, and the
/// gathers of those sums that are there, each in the agreed order. Where reductions are buffered, few are
/// under way at once; only `at_end` is anything waited for. The replicas' accumulators get the same bits,
/// also where the backend's all-reduce would not promise that: each rank sums the part it owns, and the
/// others take it over.
void GradientReducer::issue_sums(bool at_end) {
  if (!options_.replicas || !boundary_) return;
  const auto may_wait_for = [&](const comm::WorkPtr& work) {
    if (!at_end && !work->test()) return false;
    work->wait();
    return true;
  };
  while (static_cast<int>(sums_.size()) < order_.num_completed()) {
    const auto limit = static_cast<size_t>(options_.num_slots);
    if (sums_.size() >= limit && !may_wait_for(sums_[sums_.size() - limit])) break;
    const ParamUnit& unit = units_[order_.units()[sums_.size()]];
    sums_.push_back(
        options_.replicas->reduce_scatter(unit.gradient.accumulator, {owned(unit), postscale_}, unit.name));
  }
  if (!at_end && sum_gather_comm_ == options_.replicas) return;  // sums first, on every rank
  while (sum_gathers_.size() < sums_.size() && may_wait_for(sums_[sum_gathers_.size()])) {
    const ParamUnit& unit = units_[order_.units()[sum_gathers_.size()]];
    sum_gathers_.push_back(sum_gather_comm_->all_gather(unit.gradient.accumulator, owned(unit), unit.name));
  }
}

/// Collective, at an accumulation boundary.
void GradientReducer::sum_over_replicas() {
  issue_sums(/*at_end=*/true);
  for (const comm::WorkPtr& gather : sum_gathers_) gather->wait();
}

// ------------------------------------------------------------------------------------- late gradients

std::vector<bool> GradientReducer::late_units() const {
  std::vector<bool> late;
  for (const ParamUnit& unit : units_) late.push_back(unit.gradient.late);
  return late;
}

void GradientReducer::reduce_late(const std::vector<int>& units) {
  const OurOwnWork scope;
  if (!slots_.defined() && !single_rank_) make_slots();
  for (const int index : units) {
    ParamUnit& unit = units_[index];
    unit.gradient.late = false;
    if (single_rank_) {
      accumulate(unit);
      continue;
    }
    const at::Tensor flat = slot_of(unit);
    fill_slot(unit, flat);
    // At the boundary the accumulator is the mean over all ranks: so has to be what is added.
    if (options_.replicas && boundary_) sum_over(*options_.replicas, flat, unit.name);
    const at::Tensor sum = sum_goes_to(unit, /*add=*/true);
    comm_->reduce_scatter(flat, {sum, boundary_ ? postscale_ : shard_group_scale_, /*add=*/true}, unit.name)
        ->wait();
    leave_memory(unit);
    if (update_whole_ && boundary_)
      comm_->all_gather(unit.gradient.accumulator, shard(unit), unit.name)->wait();
  }
}

// ------------------------------------------------------------------------------------------- the sum

at::Tensor GradientReducer::shard(const ParamUnit& unit) const {
  const at::Tensor& accumulator = unit.gradient.accumulator;
  if (unit.placement.gradient_sharded) return accumulator;
  return accumulator.narrow(0, unit.shard_range.begin, unit.shard_range.numel());
}

at::Tensor GradientReducer::owned(const ParamUnit& unit) const {
  return shard(unit).narrow(0, unit.owned_range.begin - unit.shard_range.begin, unit.owned_range.numel());
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
  const at::Tensor token = at::zeros({1}, units_[order_.units().front()].gradient.accumulator.options());
  all_have_read_ = comm_->all_reduce(token, "gradients have been read");
}

}  // namespace tessera::zero
