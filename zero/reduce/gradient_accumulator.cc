#include "zero/reduce/gradient_accumulator.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

namespace tessera::zero {

GradientAccumulator::GradientAccumulator(const Layout& layout, std::vector<ParamUnit>& units,
                                         std::vector<at::Tensor> parameters, const Options& options)
    : layout_(layout),
      units_(units),
      parameters_(std::move(parameters)),
      options_(options),
      fired_(parameters_.size(), 0),
      expected_(parameters_.size(), 1),
      in_slot_(parameters_.size(), false),
      parts_(parameters_.size()),
      used_(parameters_.size(), false),
      waits_for_(parameters_.size(), -1),
      streams_(device_of(units)) {}

/// On CUDA: little beside what else a backward holds, and as much as a launch over a full table of parameters
/// of half a megabyte each. A larger one keeps the device busy for longer than its launch takes.
int64_t GradientAccumulator::max_waiting_bytes(at::Device device) {
  return device.is_cuda() ? int64_t{32} << 20 : 0;
}

void GradientAccumulator::begin_backward(bool first) {
  first_ = first;
  in_backward_ = true;
  std::fill(fired_.begin(), fired_.end(), 0);
  if (first) std::fill(used_.begin(), used_.end(), false);
  if (options_.single_rank) std::fill(in_slot_.begin(), in_slot_.end(), !first);
  for (ParamUnit& unit : units_) {
    unit.gradient.num_missing = static_cast<int>(unit.spec.parameters.size());
    unit.gradient.late = false;  // what came late is still in p.grad, and goes with this micro-step
  }
}

void GradientAccumulator::finish_backward() {
  put_waiting();
  in_backward_ = false;
}

void GradientAccumulator::drop() {
  waiting_.clear();
  waiting_bytes_ = 0;
  for (const ParamUnit& unit : units_) {
    if (!unit.spec.trainable) continue;
    for (const int parameter : unit.spec.parameters) parameters_[parameter].mutable_grad().reset();
  }
  std::fill(parts_.begin(), parts_.end(), at::Tensor());
  std::fill(in_slot_.begin(), in_slot_.end(), false);
  std::fill(used_.begin(), used_.end(), false);
  for (ParamUnit& unit : units_) unit.gradient.late = false;
}

void GradientAccumulator::freeze_counts() {
  for (size_t parameter = 0; parameter < expected_.size(); ++parameter)
    expected_[parameter] = std::max(1, fired_[parameter]);
}

bool GradientAccumulator::unexpected(int parameter) const {
  return options_.slots_round && fired_[parameter] >= expected_[parameter];
}

void GradientAccumulator::defer(int parameter) {
  used_[parameter] = true;
  ++fired_[parameter];
  units_[layout_.slice(parameter).unit].gradient.late = true;
}

at::Tensor GradientAccumulator::take_grad(int parameter) {
  used_[parameter] = true;  // also one left in p.grad by a backward of the user's own
  at::Tensor grad = std::exchange(parameters_[parameter].mutable_grad(), at::Tensor());
  streams_.uses(grad);  // one that stayed there may be of another stream
  return (grad.is_sparse() ? grad.to_dense() : grad).reshape(-1);
}

/// In its place now, or together with those that come next.
void GradientAccumulator::put(int parameter, kernels::Accumulation gradient) {
  if (waits_for_[parameter] == num_launches_) put_waiting();  // the part before
  waits_for_[parameter] = num_launches_;
  waiting_bytes_ += static_cast<int64_t>(gradient.grad.nbytes());
  waiting_.push_back(std::move(gradient));
  if (waiting_bytes_ >= options_.max_waiting_bytes) put_waiting();
}

void GradientAccumulator::put_waiting() {
  waiting_bytes_ = 0;
  ++num_launches_;
  kernels::accumulate(std::exchange(waiting_, {}));
}

/// Gradients that wait are of the stream before.
void GradientAccumulator::follow_stream() {
  streams_.follow([this] { put_waiting(); });
}

void GradientAccumulator::accumulate(int parameter) {
  const UnitSlice& slice = layout_.slice(parameter);
  const bool add = !first_ || fired_[parameter] > 0;
  put(parameter, {.grad = take_grad(parameter),
                  .into = units_[slice.unit].gradient.accumulator.narrow(0, slice.offset, slice.numel),
                  .add = add});
}

void GradientAccumulator::add_partial(int parameter) {
  if (!options_.slots_round) return;
  const at::Tensor grad = take_grad(parameter);
  at::Tensor& sum = parts_[parameter];
  if (sum.defined()) {
    streams_.uses(sum);
    sum.add_(grad);
  } else {
    sum = expected_[parameter] == 1
              ? grad
              : grad.to(options_.accumulate_dtype, /*non_blocking=*/false, /*copy=*/true);
  }
}

bool GradientAccumulator::ready_for_slot(int parameter) const {
  return !options_.slots_round || fired_[parameter] + 1 == expected_[parameter];
}

void GradientAccumulator::copy_into_slot(int parameter, const at::Tensor& slot) {
  const UnitSlice& slice = layout_.slice(parameter);
  const at::Tensor target = slot.narrow(0, slice.offset, slice.numel);
  streams_.uses(parts_[parameter]);
  const at::Tensor grad =
      parts_[parameter].defined() ? std::exchange(parts_[parameter], at::Tensor()) : take_grad(parameter);
  if (options_.prescale == 1) {
    put(parameter, {.grad = rounded_as_in_slot(grad), .into = target, .add = in_slot_[parameter]});
  } else if (in_slot_[parameter]) {
    target.add_(grad, options_.prescale);
  } else {
    target.copy_(grad);
    target.mul_(options_.prescale);
  }
  in_slot_[parameter] = true;
}

/// Where the slot is an accumulator of a wider type, or what is added would be rounded only with the sum.
at::Tensor GradientAccumulator::rounded_as_in_slot(const at::Tensor& grad) const {
  if (!options_.single_rank) return grad;
  const at::ScalarType dtype = options_.communicate_dtype;
  return c10::promoteTypes(grad.scalar_type(), dtype) == dtype ? grad : grad.to(dtype);
}

bool GradientAccumulator::mark_ready(int parameter) {
  used_[parameter] = true;
  ParamUnit& unit = units_[layout_.slice(parameter).unit];
  return ++fired_[parameter] == expected_[parameter] && --unit.gradient.num_missing == 0;
}

/// In p.grad, for the unit's reduction that is about to be issued; what came late stays there until the next
/// one.
bool GradientAccumulator::has_grad(int parameter) const {
  const bool late = in_backward_ && options_.slots_round && fired_[parameter] > expected_[parameter];
  return parameters_[parameter].grad().defined() && !late;
}

void GradientAccumulator::complete_slot(const ParamUnit& unit, const at::Tensor& slot) {
  for (const int parameter : unit.spec.parameters)
    if (parts_[parameter].defined() || has_grad(parameter)) copy_into_slot(parameter, slot);
  put_waiting();
  if (!options_.single_rank || first_) zero_missing(slot, unit, in_slot_);
}

void GradientAccumulator::complete_accumulator(const ParamUnit& unit) {
  for (const int parameter : unit.spec.parameters)
    if (has_grad(parameter)) accumulate(parameter);
  put_waiting();
  if (first_) zero_unused(unit);
}

void GradientAccumulator::zero_unused(const ParamUnit& unit) const {
  zero_missing(unit.gradient.accumulator, unit, used_);
}

void GradientAccumulator::leave_slot(const ParamUnit& unit) {
  if (options_.single_rank) return;
  for (const int parameter : unit.spec.parameters) in_slot_[parameter] = false;
}

/// `came`: by parameter. Zeroes the gaps between parameters too: slots are shared by units of other shapes.
void GradientAccumulator::zero_missing(const at::Tensor& flat, const ParamUnit& unit,
                                       const std::vector<bool>& came) const {
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

}  // namespace tessera::zero
