#include "zero/reduce/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/memory/allocation_failure.h"
#include "core/memory/memory_use.h"
#include "zero/kernels/kernels.h"
#include "zero/memory/pause_listening.h"
#include "zero/reduce/gradient_hook.h"

namespace tessera::zero {

/// Collective. Every rank gets the same bits.
static void sum_over(comm::Communicator& comm, const at::Tensor& flat, const std::string& label) {
  comm.reduce_scatter(flat, label)->wait();
  const int64_t numel = flat.numel() / comm.size();
  comm.all_gather(flat, flat.narrow(0, comm.rank() * numel, numel), label)->wait();
}

static int num_ranks(const comm::Communicator& comm, const ReducerOptions& options) {
  return comm.size() * (options.replicas ? options.replicas->size() : 1);
}

GradientReducer::GradientReducer(const Layout& layout, std::vector<ParamUnit>& units,
                                 std::vector<at::Tensor> parameters, comm::CommunicatorPtr comm,
                                 const ReducerOptions& options)
    : layout_(layout),
      units_(units),
      comm_(std::move(comm)),
      options_(options),
      prescale_(options.prescale ? 1.0 / num_ranks(*comm_, options) : 1 / options.predivide_factor),
      postscale_(options.prescale ? 1 : options.predivide_factor / num_ranks(*comm_, options)),
      row_scale_(options.replicas ? 1 : postscale_),
      mode_(choose_mode()),
      gradients_(layout, units, std::move(parameters),
                 {.accumulate_dtype = options.accumulate_dtype,
                  .communicate_dtype = options.communicate_dtype,
                  .prescale = prescale_,
                  .slots_round = options.communicate_dtype != options.accumulate_dtype || prescale_ != 1 ||
                                 mode_ == ReductionMode::kSingleRank,
                  .single_rank = mode_ == ReductionMode::kSingleRank,
                  .max_waiting_bytes = options.max_waiting_bytes.value_or(
                      GradientAccumulator::max_waiting_bytes(device_of(units)))}) {
  TESSERA_CHECK(options_.num_slots >= 1);
  std::vector<int> order;
  bool gathers_on_use = false;
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    gathers_on_use |= unit->placement.sharded();
    if (unit->spec.trainable) order.push_back(unit->index);
  }
  queue_ = std::make_unique<ReductionQueue>(
      units_, std::move(order),
      ReductionQueue::Options{.rank = comm_->global_rank(comm_->rank()),
                              .hooks_may_block = !gathers_on_use || !comm_->wait_blocks(),
                              .wait_limit = options_.hook_wait_limit,
                              .log = options_.log});
  if (this->order().empty()) return;
  const Placement& placement = units_[this->order().front()].placement;  // that of all trainable units
  for (const int unit : this->order()) TESSERA_CHECK(units_[unit].placement == placement);
  update_whole_ = !placement.updates_shard;
  if (options_.replicas) {
    // Where a transport reads the accumulators in place, they have to be memory of the one group.
    const bool apart = comm_->wait_blocks() && options_.replicas->buffers_reductions();
    sum_gather_comm_ = apart ? options_.replicas->duplicate("sums") : options_.replicas;
  }
  TESSERA_CHECK(!options_.replicas || (placement.gradient_sharded && placement.gradient == Tier::kDevice));
  for (const int unit : this->order()) make_accumulator(units_[unit]);
  if (through_slots()) make_slots();
  if (placement.gradient != Tier::kDevice) norms_ = zero_norms();
  if (placement.on_host(placement.gradient)) {
    const at::TensorOptions bytes =
        units_[this->order().front()].memory.full().options().dtype(at::kByte).requires_grad(false);
    on_device_.emplace(*options_.transfer, /*num_buffers=*/3, [bytes](int64_t size) {
      const MemoryFor use(MemoryUse::kCommunication);
      return at::empty({size}, bytes);
    });
  }
  reads_peers_ = update_whole_ && !through_slots() &&
                 comm_->peer_view(units_[this->order().front()].gradient.accumulator, 0).defined();
  install_hooks();  // last: the destructor removes them, which does not run for a constructor that throws
}

GradientReducer::ReductionMode GradientReducer::choose_mode() const {
  const auto trainable =
      std::find_if(units_.begin(), units_.end(), [](const ParamUnit& unit) { return unit.spec.trainable; });
  if (trainable == units_.end()) return ReductionMode::kAccumulateInPlace;
  const Placement& placement = trainable->placement;
  if (placement.gradient_sharded || options_.reduce_each_micro_step) {
    const bool nothing_to_sum = comm_->size() == 1 && !options_.replicas && prescale_ == 1 && postscale_ == 1;
    return nothing_to_sum && placement.gradient == Tier::kDevice ? ReductionMode::kSingleRank
                                                                 : ReductionMode::kReduceEachBackward;
  }
  return options_.accumulate_dtype == options_.communicate_dtype ? ReductionMode::kAccumulateInPlace
                                                                 : ReductionMode::kAccumulateThenCopy;
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

/// Those that are not there: what Python's register_post_accumulate_grad_hook() sets on a parameter that has
/// had none takes the place of ours. It runs first from then on.
void GradientReducer::install_hooks() {
  for (const int unit : order())
    for (const int parameter : units_[unit].spec.parameters) {
      const at::Tensor& tensor = gradients_.parameter(parameter);
      if (GradientHook::is_installed(this, tensor)) continue;
      GradientHook::install(this, tensor, [this, parameter] { on_gradient(parameter); });
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
      GradientHook::remove(this, gradients_.parameter(parameter));
}

void GradientReducer::begin_backward(bool first, bool boundary) {
  if (under_way())
    throw Error("the backward pass before this one failed half-way, and its gradients are lost");
  install_hooks();
  boundary_ = boundary;
  gradients_.begin_backward(first);
  if (all_have_read_) std::exchange(all_have_read_, nullptr)->wait();
  sums_.clear();
  sum_gathers_.clear();
  queue_->begin();
}

// ------------------------------------------------------------------------------- gradients that come

/// A gradient that comes now has missed its unit's reduction.
bool GradientReducer::late(int parameter) const {
  const int place = units_[layout_.slice(parameter).unit].gradient.place;
  return reducing() && (gradients_.unexpected(parameter) || place < queue_->num_issued());
}

void GradientReducer::on_gradient(int parameter) {
  if (!under_way()) return;  // a backward of the user's own, e.g. torch::autograd::grad on the side
  if (check) check();
  if (!gradients_.parameter(parameter).grad().defined()) return;  // a hook that ran before has freed it
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  gradients_.follow_stream();
  if (late(parameter)) return gradients_.defer(parameter);
  ParamUnit& unit = units_[layout_.slice(parameter).unit];
  if (each_backward()) {
    gradients_.add_partial(parameter);
    if (gradients_.ready_for_slot(parameter) && claim_slot(unit, queue_->in_hook()))
      gradients_.copy_into_slot(parameter, slot_of(unit));
  } else {
    gradients_.accumulate(parameter);
  }
  if (gradients_.mark_ready(parameter)) {
    if (!reducing()) return;
    if (!order_agreed_) finished_.push_back(unit.index);
    if (!issued_from_outside || !issued_from_outside()) issue_ready(/*at_end=*/false);
  }
  // Frees slots early; where ranks reduce in each other's memory (comm/shm/shm), it is also this rank's part
  // of the work.
  while (queue_->in_flight() > 0 && complete_next(Wait::kNo)) {
  }
}

bool GradientReducer::claim_slot(ParamUnit& unit, Wait wait) {
  if (unit.gradient.in_slot || mode_ == ReductionMode::kSingleRank) return true;
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
  gradients_.leave_slot(unit);
}

at::Tensor GradientReducer::slot_of(const ParamUnit& unit) const {
  return mode_ == ReductionMode::kSingleRank ? unit.gradient.accumulator : slots_->view(unit.gradient.place);
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
  if (on_device_ && !gradients_.first() && !queue_->all_issued()) bring_accumulator(queue_->next(), true);
  if (!options_.overlap) complete_next(wait);
  return true;
}

int GradientReducer::num_ready() const {
  if (!under_way()) return 0;
  return order_agreed_ ? queue_->num_ready() : static_cast<int>(finished_.size());
}

void GradientReducer::issue_until(int count) {
  if (!under_way() || !reducing()) return;
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
  if (each_backward()) {
    gradients_.complete_slot(unit, slot_of(unit));
    return slot_of(unit);
  }
  gradients_.complete_accumulator(unit);
  at::Tensor flat = unit.gradient.accumulator;
  if (through_slots()) {
    flat = slot_of(unit);
    flat.copy_(unit.gradient.accumulator);
  }
  if (prescale_ != 1) flat.mul_(prescale_);
  return flat;
}

void GradientReducer::issue(ParamUnit& unit) {
  gradients_.follow_stream();
  const at::Tensor flat = prepare_buffer(unit);
  const bool add = mode_ == ReductionMode::kReduceEachBackward && !gradients_.first();
  const at::Tensor sum = sum_goes_to(unit, add);
  unit.gradient.reduction = update_whole_ && !through_slots() && !reads_peers_
                                ? comm_->all_reduce(flat, unit.name, postscale_)
                                : comm_->reduce_scatter(flat, {sum, row_scale_, add}, unit.name);
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

/// Begins to, ahead of the unit's reduction.
void GradientReducer::bring_accumulator(ParamUnit& unit, bool add) {
  StagingPool::Buffer& buffer = unit.gradient.on_device;
  if (buffer.memory.defined()) return;
  unit.acquire(kGradient, add ? InMemory::Access::kReadWrite : InMemory::Access::kOverwrite);
  if (!on_device_) return;
  buffer = on_device_->take(static_cast<int64_t>(shard(unit).nbytes()));
  if (!add) return;
  unit.wait_for_gradient();  // of the micro-step before
  // Memory that was allocated just now may still be used by what the current stream was given before.
  if (!buffer.free) buffer.free = options_.transfer->record();
  buffer.free = options_.transfer->h2d(sum_on_device(unit), shard(unit), buffer.free);
}

bool GradientReducer::complete_next(Wait wait) {
  ParamUnit* const unit = queue_->complete_next(wait);
  if (unit == nullptr) return false;
  free_slot(*unit);
  leave_memory(*unit);
  // Elsewhere the order relative to the row's operations is not free: [Note: one order on a device].
  if (options_.overlap && comm_->wait_blocks()) issue_sums(/*at_end=*/false);
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

at::Tensor GradientReducer::norms() const {
  if (norms_.defined()) return norms_;
  const at::Tensor sums = zero_norms();
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> rows;
  for (const ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    pieces.push_back(piece(unit));
    rows.push_back(unit.index);
  }
  kernels::squared_norms(pieces, sums, rows);
  return sums;
}

at::Tensor GradientReducer::zero_norms() const {
  const at::TensorOptions on_device = units_.front().memory.full().options().requires_grad(false);
  return at::zeros({static_cast<int64_t>(units_.size()), 2}, on_device.dtype(at::kDouble));
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
  TESSERA_CHECK(under_way());
  gradients_.follow_stream();
  if (before_waiting) before_waiting();
  if (reducing()) {
    complete_all();
    if (!order_agreed_) agree_on_order();
  } else if (gradients_.first()) {
    for (const int unit : order()) gradients_.zero_unused(units_[unit]);
  }
  gradients_.finish_backward();
}

/// Collective. Issues and waits for what is left.
void GradientReducer::complete_all() {
  issue_ready(/*at_end=*/true);
  while (queue_->in_flight() > 0) complete_next(Wait::kUntilDone);
  gather_results();
  sum_over_replicas();
}

void GradientReducer::agree_on_order() {
  for (const int unit : order())
    if (std::find(finished_.begin(), finished_.end(), unit) == finished_.end()) finished_.push_back(unit);
  std::vector<int> order = comm_->exchange(finished_, "order of gradient reduction").front();
  if (options_.replicas) order = options_.replicas->exchange(order, "order of gradient reduction").front();
  queue_->set_order(std::move(order));
  if (slots_) slots_->arrange(numels_in_order());
  gradients_.freeze_counts();
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
  if (!slots_ && mode_ != ReductionMode::kSingleRank) make_slots();
  for (const int index : units) {
    ParamUnit& unit = units_[index];
    const at::Tensor flat = slot_of(unit);
    gradients_.complete_slot(unit, flat);
    unit.gradient.late = false;
    if (mode_ == ReductionMode::kSingleRank) continue;
    // The accumulator is the mean over all ranks by now: so has to be what is added.
    if (options_.replicas) sum_over(*options_.replicas, flat, unit.name);
    const at::Tensor sum = sum_goes_to(unit, /*add=*/true);
    comm_->reduce_scatter(flat, {sum, postscale_, /*add=*/true}, unit.name)->wait();
    leave_memory(unit);
    if (update_whole_) comm_->all_gather(unit.gradient.accumulator, shard(unit), unit.name)->wait();
    free_slot(unit);
  }
}

// ------------------------------------------------------------------------------------------- the sum

at::Tensor GradientReducer::shard(const ParamUnit& unit) const {
  const at::Tensor& accumulator = unit.gradient.accumulator;
  if (unit.placement.gradient_sharded) return accumulator;
  return accumulator.narrow(0, unit.shard_range.begin, unit.shard_range.numel());
}

at::Tensor GradientReducer::piece(const ParamUnit& unit) const {
  return shard(unit).narrow(0, unit.piece_range.begin - unit.shard_range.begin, unit.piece_range.numel());
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
