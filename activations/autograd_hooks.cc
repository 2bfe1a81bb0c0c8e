#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <mutex>

#include "activations/checkpointing.h"

namespace tessera::activations {
namespace {

class Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { saved_ = save_on_this_thread(tensor); }
  at::Tensor call_unpack_hook() override { return saved_->unpack(); }

 private:
  std::shared_ptr<SavedTensor> saved_;
};

/// Autograd's engine as it is, but for what it asks of its engine when a tensor is saved.
class HookedEngine final : public torch::autograd::Engine {
 public:
  ~HookedEngine() override { stop(); }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return records_on_this_thread() ? std::make_unique<Hooks>() : nullptr;
  }
  static torch::autograd::Engine& of_process() {
    static HookedEngine engine;
    return engine;
  }
};

}  // namespace

void install_autograd_hooks() {
  static std::once_flag once;
  std::call_once(once, [] { torch::autograd::set_default_engine_stub(&HookedEngine::of_process); });
}

}  // namespace tessera::activations
