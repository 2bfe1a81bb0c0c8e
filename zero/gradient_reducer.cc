#include "zero/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "core/check.h"
#include "core/error.h"
#include "core/memory_use.h"
#include "zero/operator_listener.h"

namespace tessera::zero {

/// Runs after autograd has accumulated into `p.grad`; a hook that was there before runs first.
class GradientReducer::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientReducer* reducer, int parameter) : reducer_(reducer), parameter_(parameter) {}

  void operator()(const torch::autograd::Variable& variable) override {
    if (previous_) (*previous_)(variable);
    reducer_->on_gradient(parameter_);
  }

  static void install(GradientReducer* reducer, int parameter, const at::Tensor& tensor) {
    auto hook = std::make_unique<Hook>(reducer, parameter);
    hook->previous_ = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::move(hook));
  }

  /// Takes the reducer's hook out of the chain, wherever in it.
  static void remove(const GradientReducer* reducer, const at::Tensor& tensor) {
    auto* link = &torch::autograd::impl::post_acc_grad_hooks(tensor);
    while (auto* hook = dynamic_cast<Hook*>(link->get())) {
      if (hook->reducer_ == reducer) {
        std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous = std::move(hook->previous_);
        *link = std::move(previous);
        return;
      }
      link = &hook->previous_;
    }
  }

 private:
  GradientReducer* reducer_;
  int parameter_;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous_;
};

/// Collective. (numel) in memory that the other ranks can read, where there is such memory.
static at::Tensor symmetric_zeros(comm::Communicator& comm, int64_t numel, const at::TensorOptions& like,
                                  const std::string& label) {
  const int64_t bytes = numel * static_cast<int64_t>(like.dtype().itemsize());
  return comm.allocate_symmetric(bytes, like.device(), label).view(like.dtype().toScalarType()).zero_();
}

GradientReducer::GradientReducer(const Layout& layout, std::vector<at::Tensor> parameters,
                                 comm::CommunicatorPtr comm, const ReducerOptions& options)
    : layout_(layout),
      parameters_(std::move(parameters)),
      comm_(std::move(comm)),
      options_(options),
      units_(layout.num_units()),
      works_(layout.num_units()),
      fired_(parameters_.size(), 0),
      expected_(parameters_.size(), 1),
      staged_(parameters_.size(), false),
      parts_(parameters_.size()),
      used_(parameters_.size(), false) {
  TESSERA_CHECK(options_.num_slots >= 1);
  const double world = comm_->size();
  prescale_ = options_.prescale ? 1 / world : 1 / options_.predivide_factor;
  postscale_ = options_.prescale ? 1 : options_.predivide_factor / world;
  slots_round_ = options_.communicate_dtype != options_.accumulate_dtype || prescale_ != 1;
  for (int unit = layout_.num_units() - 1; unit >= 0; --unit) {
    if (!layout_.units()[unit].trainable) continue;
    const at::TensorOptions like = parameters_[layout_.units()[unit].parameters.front()].options();
    const int64_t numel =
        options_.sharding.gradients ? layout_.shard_numel(unit) : layout_.units()[unit].numel;
    const MemoryFor use(MemoryUse::kGradients);
    units_[unit].accumulator =
        through_slots()
            ? at::zeros({numel}, like.dtype(options_.accumulate_dtype).requires_grad(false))
            : symmetric_zeros(*comm_, numel, like.dtype(options_.accumulate_dtype), layout_.describe(unit));
    units_[unit].place = static_cast<int>(order_.size());
    order_.push_back(unit);
    for (int parameter : layout_.units()[unit].parameters) {
      parameters_[parameter].mutable_grad().reset();
      Hook::install(this, parameter, parameters_[parameter]);
    }
  }
  if (through_slots()) make_slots();
  reads_peers_ = whole_in_place() && !order_.empty() &&
                 comm_->peer_view(units_[order_.front()].accumulator, 0).defined();
}

// Collective: all of them at once, because ranks come to their first use at different times.
void GradientReducer::make_slots() {
  if (order_.empty()) return;
  int64_t largest = 0, sum = 0;
  for (int unit : order_) {
    largest = std::max(largest, layout_.units()[unit].numel);
    sum += layout_.units()[unit].numel;
  }
  const auto num_units = static_cast<int64_t>(order_.size());
  const int64_t few = std::min<int64_t>(options_.num_slots, num_units) * sum / num_units;
  const at::TensorOptions like =
      units_[order_.front()].accumulator.options().dtype(options_.communicate_dtype);
  const MemoryFor use(MemoryUse::kCommunication);
  slots_ = symmetric_zeros(*comm_, std::max(largest, few), like, "gradient buffer");
  place_slots();
}

/// [Note: a ring of slots]
void GradientReducer::place_slots() {
  if (!slots_.defined()) return;
  int64_t end = 0;
  for (size_t place = 0; place < order_.size(); ++place) {
    const int64_t numel = layout_.units()[order_[place]].numel;
    UnitState& state = units_[order_[place]];
    state.slot_offset = end + numel <= slots_.numel() ? end : 0;
    end = state.slot_offset + numel;
    const auto overlaps = [&](int before) {
      const int64_t begin = units_[order_[before]].slot_offset;
      return begin < end && state.slot_offset < begin + layout_.units()[order_[before]].numel;
    };
    state.after = static_cast<int>(place) - 1;
    while (state.after >= 0 && !overlaps(state.after)) --state.after;
  }
}

GradientReducer::~GradientReducer() {
  for (int unit : order_)
    for (int parameter : layout_.units()[unit].parameters) Hook::remove(this, parameters_[parameter]);
}

void GradientReducer::begin_backward(bool first, bool boundary) {
  if (in_backward_)
    throw Error("the backward pass before this one failed half-way, and its gradients are lost");
  first_ = first;
  boundary_ = boundary;
  in_backward_ = true;
  if (all_have_read_) std::exchange(all_have_read_, nullptr)->wait();
  if (impatient_passes_ > 0) --impatient_passes_;
  next_issue_ = next_complete_ = 0;
  std::fill(fired_.begin(), fired_.end(), 0);
  if (first) std::fill(used_.begin(), used_.end(), false);
  for (int unit : order_) {
    units_[unit].num_missing = static_cast<int>(layout_.units()[unit].parameters.size());
    units_[unit].late = false;  // what came late is still in p.grad, and goes with this micro-step
  }
}

/// Stages 0 and 1 sum micro-steps locally, and reduce that sum in place when no cast lies between.
bool GradientReducer::through_slots() const {
  return !sums_locally() || options_.accumulate_dtype != options_.communicate_dtype;
}

/// A gradient that comes now has missed its unit's reduction.
bool GradientReducer::late(int parameter) const {
  const bool unexpected = slots_round_ && fired_[parameter] >= expected_[parameter];
  return reducing() && (unexpected || units_[layout_.slot(parameter).unit].place < next_issue_);
}

void GradientReducer::on_gradient(int parameter) {
  if (!in_backward_) return;  // a backward of the user's own, e.g. torch::autograd::grad on the side
  if (check) check();
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  const int unit = layout_.slot(parameter).unit;
  UnitState& state = units_[unit];
  used_[parameter] = true;
  if (late(parameter)) {
    ++fired_[parameter];
    state.late = true;
    return;
  }
  if (sums_locally()) {
    accumulate_locally(parameter);
  } else if (slots_round_) {
    take_part(parameter);
    if (fired_[parameter] + 1 == expected_[parameter] && claim_slot(unit, in_hook())) stage(parameter);
  } else if (claim_slot(unit, in_hook())) {
    stage(parameter);
  }
  if (++fired_[parameter] == expected_[parameter] && --state.num_missing == 0) {
    if (!reducing()) return;
    if (!order_agreed_) finished_.push_back(unit);
    if (!issued_from_outside || !issued_from_outside()) issue_ready(/*at_end=*/false);
  }
  complete_what_has_arrived();
}

at::Tensor GradientReducer::take_grad(int parameter) {
  used_[parameter] = true;  // also one left in p.grad by a backward of the user's own
  at::Tensor grad = std::exchange(parameters_[parameter].mutable_grad(), at::Tensor());
  return (grad.is_sparse() ? grad.to_dense() : grad).reshape(-1);
}

void GradientReducer::accumulate_locally(int parameter) {
  const zero::Slot& slot = layout_.slot(parameter);
  const at::Tensor target = units_[slot.unit].accumulator.narrow(0, slot.offset, slot.numel);
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

GradientReducer::Wait GradientReducer::in_hook() const {
  if (!options_.sharding.parameters)
    return Wait::kUntilDone;  // the other ranks need nothing of this one to get there
  if (!comm_->wait_blocks()) return Wait::kUntilDone;  // it blocks no thread; see [Note: patience]
  return waits_in_hooks() ? Wait::kPatiently : Wait::kNo;
}

bool GradientReducer::claim_slot(int unit, Wait wait) {
  UnitState& state = units_[unit];
  if (state.in_slot) return true;
  if (state.after >= next_issue_) return false;  // whoever has the slot cannot be reduced yet
  while (state.after >= next_complete_) {
    if (next_complete_ == next_issue_ || !complete_next(wait)) return false;
  }
  state.in_slot = true;
  max_slots_in_use_ = std::max(max_slots_in_use_,
                               static_cast<int>(std::count_if(units_.begin(), units_.end(),
                                                              [](const UnitState& u) { return u.in_slot; })));
  return true;
}

at::Tensor GradientReducer::slot_view(int unit) {
  return slots_.narrow(0, units_[unit].slot_offset, layout_.units()[unit].numel);
}

void GradientReducer::stage(int parameter) {
  const zero::Slot& slot = layout_.slot(parameter);
  const at::Tensor target = slot_view(slot.unit).narrow(0, slot.offset, slot.numel);
  const at::Tensor grad =
      parts_[parameter].defined() ? std::exchange(parts_[parameter], at::Tensor()) : take_grad(parameter);
  if (staged_[parameter]) {
    target.add_(grad, prescale_);
  } else {
    target.copy_(grad);
    if (prescale_ != 1) target.mul_(prescale_);
  }
  staged_[parameter] = true;
}

void GradientReducer::stage_rest(int unit) {
  for (int parameter : layout_.units()[unit].parameters)
    if (parts_[parameter].defined() || has_grad(parameter)) stage(parameter);
}

/// In p.grad, for the unit's reduction that is about to be issued; what came
/// late waits there for reduce_late().
bool GradientReducer::has_grad(int parameter) const {
  const bool came_late = in_backward_ && slots_round_ && fired_[parameter] > expected_[parameter];
  return parameters_[parameter].grad().defined() && !came_late;
}

/// `came`: by parameter. Zeroes the gaps between parameters too: slots are shared by units of other shapes.
void GradientReducer::zero_what_never_came(const at::Tensor& flat, int unit, const std::vector<bool>& came) {
  int64_t end = 0;
  const auto zero_up_to = [&](int64_t begin) {
    if (begin > end) flat.narrow(0, end, begin - end).zero_();
  };
  for (int parameter : layout_.units()[unit].parameters) {
    if (!came[parameter]) continue;
    zero_up_to(layout_.slot(parameter).offset);
    end = layout_.slot(parameter).range().end;
  }
  zero_up_to(flat.numel());
}

void GradientReducer::issue_ready(bool at_end) {
  while (next_issue_ < static_cast<int>(order_.size())) {
    if (!at_end && units_[order_[next_issue_]].num_missing > 0) return;
    if (!issue_next(at_end ? Wait::kUntilDone : in_hook())) return;
  }
}

/// False when that takes a wait which `wait` does not allow.
bool GradientReducer::issue_next(Wait wait) {
  const int unit = order_[next_issue_];
  if (through_slots() && !claim_slot(unit, wait)) return false;
  if (!has_room(wait)) return false;
  issue(unit);
  ++next_issue_;
  if (!options_.overlap) complete_next(wait);
  return true;
}

int GradientReducer::num_ready() const {
  if (!in_backward_) return 0;
  if (!order_agreed_) return static_cast<int>(finished_.size());
  int ready = next_issue_;
  while (ready < static_cast<int>(order_.size()) && units_[order_[ready]].num_missing == 0) ++ready;
  return ready;
}

void GradientReducer::issue_until(int count) {
  if (!in_backward_ || !reducing()) return;
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  while (next_issue_ < count) TESSERA_CHECK(issue_next(Wait::kUntilDone));
}

/// Slots bound what is under way; where there are none, and the transport has buffers instead, this does.
bool GradientReducer::has_room(Wait wait) {
  if (through_slots() || whole_in_place() || !comm_->buffers_reductions())
    return true;  // an all-reduce is in place
  while (next_issue_ - next_complete_ >= options_.num_slots)
    if (!complete_next(wait)) return false;
  return true;
}

void GradientReducer::issue(int unit) {
  UnitState& state = units_[unit];
  at::Tensor flat;
  if (sums_locally()) {
    for (int parameter : layout_.units()[unit].parameters)
      if (has_grad(parameter)) accumulate_locally(parameter);
    if (first_) zero_what_never_came(state.accumulator, unit, used_);
    flat = state.accumulator;
    if (through_slots()) {
      flat = slot_view(unit);
      flat.copy_(state.accumulator);
    }
    if (prescale_ != 1) flat.mul_(prescale_);
  } else {
    stage_rest(unit);
    flat = slot_view(unit);
    zero_what_never_came(flat, unit, staged_);
  }
  const std::string label = layout_.describe(unit);
  works_[unit] =
      whole_in_place() && !reads_peers_
          ? comm_->all_reduce(flat, label, postscale_)
          : comm_->reduce_scatter(flat, {shard(unit), postscale_, /*add=*/!first_ && !sums_locally()}, label);
}

void GradientReducer::free_slot(int unit) {
  units_[unit].in_slot = false;
  for (int parameter : layout_.units()[unit].parameters) staged_[parameter] = false;
}

/// False when the oldest reduction has not arrived, and `wait` lets it be.
bool GradientReducer::complete_next(Wait wait) {
  const int unit = order_[next_complete_];
  comm::WorkPtr& work = works_[unit];
  if (wait == Wait::kNo && !work->test()) return false;
  if (wait == Wait::kPatiently && !patiently(*work)) return false;
  work->wait();
  work.reset();
  free_slot(unit);
  ++next_complete_;
  return true;
}

bool GradientReducer::patiently(comm::Work& work) {
  using std::chrono::microseconds;
  const auto deadline = std::chrono::steady_clock::now() + options_.patience;
  for (microseconds pause(10); !work.test(); pause = std::min(pause * 2, microseconds(500))) {
    if (std::chrono::steady_clock::now() > deadline) {
      const bool first_time = next_impatient_passes_ == 8;
      impatient_passes_ = next_impatient_passes_;
      next_impatient_passes_ = std::min(next_impatient_passes_ * 2, 1 << 20);
      if (!first_time) return false;
      options_.log.warning(str(
          "rank ", comm_->rank(), " waited ", options_.patience.count() / 1000.0,
          " s during backward for the gradients of ", layout_.describe(order_[next_complete_]),
          ": the ranks seem to use different parameters. Results don't change, but gradients then wait in "
          "p.grad, in memory that stage 3 does not bound"));
      return false;
    }
    std::this_thread::sleep_for(pause);
  }
  return true;
}

/// Frees slots early; where ranks reduce in each other's memory (comm/shm), it
/// is also this rank's part of the work.
void GradientReducer::complete_what_has_arrived() {
  while (next_complete_ < next_issue_ && complete_next(Wait::kNo)) {
  }
}

/// Collective. What was reduced through slots is here in this rank's shard only; stage 0 wants all of it.
void GradientReducer::gather_results() {
  if (options_.sharding.optimizer || !through_slots() || !boundary_) return;
  for (int unit : order_)
    works_[unit] = comm_->all_gather(units_[unit].accumulator, shard(unit), layout_.describe(unit));
  for (int unit : order_) std::exchange(works_[unit], nullptr)->wait();
}

void GradientReducer::finish_backward() {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(in_backward_);
  if (before_waiting) before_waiting();
  if (reducing()) {
    issue_ready(/*at_end=*/true);
    while (next_complete_ < next_issue_) complete_next(Wait::kUntilDone);
    gather_results();
    if (!order_agreed_) agree_on_order();
  } else if (first_) {
    for (int unit : order_) zero_what_never_came(units_[unit].accumulator, unit, used_);
  }
  in_backward_ = false;
}

void GradientReducer::agree_on_order() {
  for (int unit : order_)
    if (std::find(finished_.begin(), finished_.end(), unit) == finished_.end()) finished_.push_back(unit);
  std::istringstream agreed(comm_->exchange(join(finished_, " "), "order of gradient reduction").front());
  order_.clear();
  for (int unit; agreed >> unit;) {
    units_[unit].place = static_cast<int>(order_.size());
    order_.push_back(unit);
  }
  for (size_t parameter = 0; parameter < expected_.size(); ++parameter)
    expected_[parameter] = std::max(1, fired_[parameter]);
  order_agreed_ = true;
  place_slots();
}

std::vector<bool> GradientReducer::late_units() const {
  std::vector<bool> late;
  for (const UnitState& unit : units_) late.push_back(unit.late);
  return late;
}

void GradientReducer::reduce_late(const std::vector<int>& units) {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  if (!slots_.defined()) make_slots();
  for (int unit : units) {
    next_issue_ = next_complete_ = units_[unit].place;
    TESSERA_CHECK(claim_slot(unit, Wait::kNo));
    stage_rest(unit);
    const at::Tensor flat = slot_view(unit);
    zero_what_never_came(flat, unit, staged_);
    const std::string label = layout_.describe(unit);
    comm_->reduce_scatter(flat, {shard(unit), postscale_, /*add=*/true}, label)->wait();
    if (!options_.sharding.optimizer) comm_->all_gather(units_[unit].accumulator, shard(unit), label)->wait();
    units_[unit].late = false;
    free_slot(unit);
  }
  next_issue_ = next_complete_ = 0;
}

at::Tensor GradientReducer::shard(int unit) const {
  const at::Tensor& accumulator = units_[unit].accumulator;
  if (options_.sharding.gradients) return accumulator;
  const Range mine = layout_.shard(unit, comm_->rank());
  return accumulator.narrow(0, mine.begin, mine.numel());
}

at::Tensor GradientReducer::reduced(int unit, Range range) const {
  if (options_.sharding.gradients) {
    return units_[unit].accumulator.narrow(0, range.begin - layout_.shard(unit, comm_->rank()).begin,
                                           range.numel());
  }
  const at::Tensor mine = units_[unit].accumulator.narrow(0, range.begin, range.numel());
  const int owner = static_cast<int>(range.begin / layout_.shard_numel(unit));
  return reads_peers_ && owner != comm_->rank() ? comm_->peer_view(mine, owner) : mine;
}

void GradientReducer::done_reading() {
  if (!reads_peers_) return;
  const at::Tensor token = at::zeros({1}, units_[order_.front()].accumulator.options());
  all_have_read_ = comm_->all_reduce(token, "gradients have been read");
}

int64_t GradientReducer::accumulator_bytes() const {
  int64_t bytes = 0;
  for (int unit : order_) bytes += units_[unit].accumulator.nbytes();
  return bytes;
}

int64_t GradientReducer::slot_bytes() const {
  return slots_.defined() ? static_cast<int64_t>(slots_.nbytes()) : 0;
}

}  // namespace tessera::zero
