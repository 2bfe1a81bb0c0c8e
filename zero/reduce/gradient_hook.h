// GradientHook: a function that runs after autograd has accumulated into a parameter's `grad`. A hook that
// was there before runs first.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>

namespace tessera::zero {

/// Calls a function after autograd has accumulated into a parameter's grad.
class GradientHook : public torch::autograd::PostAccumulateGradHook {
 public:
  /// `owner`: for remove().
  static void install(const void* owner, const at::Tensor& tensor, std::function<void()> function) {
    auto hook = std::make_unique<GradientHook>();
    hook->owner_ = owner;
    hook->function_ = std::move(function);
    hook->previous_ = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::move(hook));
  }

  /// Whether the owner's hook is in the tensor's chain: whoever sets hooks of his own anew has
  /// replaced it.
  static bool is_installed(const void* owner, const at::Tensor& tensor) {
    const auto* hook = dynamic_cast<GradientHook*>(torch::autograd::impl::post_acc_grad_hooks(tensor).get());
    while (hook != nullptr && hook->owner_ != owner)
      hook = dynamic_cast<GradientHook*>(hook->previous_.get());
    return hook != nullptr;
  }

  /// Takes the owner's hook out of the tensor's chain, wherever in it.
  static void remove(const void* owner, const at::Tensor& tensor) {
    auto* link = &torch::autograd::impl::post_acc_grad_hooks(tensor);
    while (auto* hook = dynamic_cast<GradientHook*>(link->get())) {
      if (hook->owner_ == owner) {
        std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous = std::move(hook->previous_);
        *link = std::move(previous);
        return;
      }
      link = &hook->previous_;
    }
  }

  void operator()(const torch::autograd::Variable& variable) override {
    if (previous_) (*previous_)(variable);
    function_();
  }

 private:
  const void* owner_ = nullptr;
  std::function<void()> function_;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous_;
};

}  // namespace tessera::zero
