// What lies in grad() of the parameters between backward passes.
#include "core/error.h"
#include "core/str.h"
#include "zero/reduce/gradient_hook.h"
#include "zero/sharded_model.h"

namespace tessera::zero {

void ShardedModel::drop_gradients_of_untrained() {
  for (int parameter = 0; parameter < layout_->num_parameters(); ++parameter) {
    const at::Tensor& tensor = parameters_[parameter];
    if (layout_->parameters()[parameter].trainable || !tensor.requires_grad()) continue;
    untrained_.push_back(tensor);
    tensor.mutable_grad().reset();
    GradientHook::install(this, tensor, [&tensor] { tensor.mutable_grad().reset(); });
  }
}

void ShardedModel::check_gradients() {
  taken_->leave();
  for (const at::Tensor& parameter : untrained_)  // where a hook of the user's has replaced ours
    parameter.mutable_grad().reset();
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const ParamUnit& unit = units_[layout_->slice(static_cast<int>(parameter)).unit];
    if (!parameters_[parameter].grad().defined() || unit.gradient.late) continue;
    if (!layout_->parameters()[parameter].trainable)
      throw Error(
          str("parameter ", layout_->parameters()[parameter].name,
              " was frozen at initialize() and has a gradient now: leave it trainable there, and freeze "
              "it afterwards until it is to be trained"));
    throw Error(
        str("parameter ", layout_->parameters()[parameter].name,
            " has a gradient that did not come from backward(loss) of its engine, which takes the place of "
            "loss.backward(); if it is of another engine's loss, or was meant for something else, call "
            "zero_grad() of this "
            "engine first. One loss that is to train two models needs both in one module, with one engine"));
  }
}

void ShardedModel::free_gradients() {
  taken_->forget();
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

}  // namespace tessera::zero
