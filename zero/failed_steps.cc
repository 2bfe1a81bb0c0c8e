// A step that fails, or is dropped: how a failure is kept, who is told of it, and how the step is left, so
// that the next one can begin. Parts of Residency, GradientReducer and ShardedModel.
#include <ATen/core/grad_mode.h>

#include <exception>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "zero/gather/residency.h"
#include "zero/memory/pause_listening.h"
#include "zero/reduce/gradient_reducer.h"
#include "zero/sharded_model.h"

namespace tessera::zero {

// ---------------------------------------------------------------------------------------- residency

/// Null: the failure that is kept.
void Residency::refuse(ParamUnit& unit, const std::exception_ptr& failure) noexcept {
  if (failure) failure_.keep(failure);
  unit.memory.refuse(failure_.message());
  operator_refused_ = true;
}

void Residency::rethrow() {
  const Lock lock(mutex_);
  failure_.rethrow();
}

void Residency::keep_failure(const std::exception_ptr& failure, bool thrown) {
  const Lock lock(mutex_);
  thrown ? failure_.keep_thrown(failure) : failure_.keep(failure);
}

bool Residency::has_failure() const {
  const Lock lock(mutex_);
  return static_cast<bool>(failure_);
}

void Residency::forget_failure() {
  const Lock lock = enter("a failed step is left");
  failure_.clear();
  cache_.wait_all();
  for (ParamUnit& unit : units_) {
    if (is_behind(unit) || unit.readable_again()) continue;
    if (unit.placement.sharded()) {
      cache_.drop(unit);
    } else {
      cache_.unshard(unit);
    }
  }
  drop_pass();
  cache_.reshard_unpinned();
}

// ---------------------------------------------------------------------------------------- gradients

void GradientReducer::drop_backward() {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(under_way());
  if (before_waiting) before_waiting();
  if (reducing()) complete_all();
  if (!order_agreed_) finished_.clear();
  gradients_.finish_backward();
}

void GradientReducer::drop() { gradients_.drop(); }

// ---------------------------------------------------------------------------------------- the model

void ShardedModel::check_usable() {
  if (failure_) std::rethrow_exception(failure_);
  residency_->rethrow();
  versions_->check();
}

void ShardedModel::check_replaceable(bool whole) {
  if (offload_store_ && residency_->has_failure()) parameters_incomplete_ = true;
  if (parameters_incomplete_ && !whole) check_usable();
  versions_->check();
}

bool ShardedModel::has_failed() const { return failure_ || residency_->has_failure(); }

void ShardedModel::drop_gradients() {
  leave_step(/*parameters_too=*/false);
  if (training_) begin_pass(Pass::kTrain);
}

// Ranks may have come to different places of the step: one may wait for what the others have not issued. So
// all of them issue what is left of it, and drop what comes out.
void ShardedModel::leave_step(bool parameters_too) {
  struct State {
    bool in_backward, at_boundary, parameters_incomplete;
  };
  if (offload_store_ && residency_->has_failure()) parameters_incomplete_ = true;
  const State mine{gradients_->under_way(), gradients_->at_boundary(), parameters_incomplete_};
  State any = mine;
  for (const State& theirs : comm_->exchange(mine, "a step is dropped")) {
    if (theirs.in_backward && !any.in_backward) any.at_boundary = theirs.at_boundary;
    any.in_backward |= theirs.in_backward;
    any.parameters_incomplete |= theirs.parameters_incomplete;
  }
  if (any.parameters_incomplete && !parameters_too) {
    check_usable();
    throw Error("another rank's update failed and left its parameters incomplete: load a checkpoint");
  }
  if (any.parameters_incomplete) {
    optimizer_->drop_step();
  } else {
    finish_updates();
  }
  if (any.in_backward) {
    if (!mine.in_backward) gradients_->begin_backward(/*first=*/true, any.at_boundary);
    gradients_->drop_backward();
  }
  gradients_->drop();
  free_gradients();
  used_.clear();
  residency_->forget_failure();
  failure_ = nullptr;
}

void ShardedModel::begin_replacing(std::string_view call) {
  leave_step(/*parameters_too=*/true);
  failure_ = std::make_exception_ptr(
      Error(str(call, " failed half-way, and the parameters are neither old nor new")));
  parameters_incomplete_ = true;
  residency_->wait_all();
  if (options_.transfer) options_.transfer->synchronize();  // copies read what is replaced
}

void ShardedModel::end_replacing() {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  for (ParamUnit& unit : units_) {
    if (!unit.has_own_master()) continue;
    const InMemory weights(unit, kUpdated, InMemory::Access::kReadWrite);
    at::Tensor(unit.values()).copy_(unit.master);
  }
  for (int parameter = 0; parameter < layout_->num_parameters(); ++parameter)
    versions_->written_by_engine(parameter);
  if (gathered_) residency_->parameters_updated(/*frozen_too=*/true);
  if (training_) begin_pass(Pass::kTrain);
  failure_ = nullptr;
  parameters_incomplete_ = false;
}

}  // namespace tessera::zero
