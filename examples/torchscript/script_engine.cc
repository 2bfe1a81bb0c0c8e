#include "examples/torchscript/script_engine.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <utility>

#include "comm/torch_dtype.h"
#include "examples/torchscript/device_constants.h"
#include "zero/model/model_view.h"
#include "zero/plan/stage.h"

namespace tessera::examples {

ScriptEngine::ScriptEngine(const std::string& path, const std::string& eval_path)
    : path_(path), eval_path_(eval_path) {
  ScriptModel training = load_script_model(path);
  training_ = std::move(training.module);
  training_file_ = std::move(training.file);
  if (eval_path.empty()) return;
  ScriptModel evaluation = load_script_model(eval_path);
  evaluation_ = std::move(evaluation.module);
  evaluation_file_ = std::move(evaluation.file);
  evaluation_->eval();
  own_buffers_ = share_parameters(*evaluation_, eval_path, *training_, path);
}

void ScriptEngine::check_arguments(const CallOfForward& call) const {
  examples::check_arguments(*training_, path_, call);
  if (evaluation_) examples::check_arguments(*evaluation_, eval_path_, call);
}

Engine& ScriptEngine::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                 const InitOptions& options) {
  if (evaluation_) zero::refuse_forks(zero::view_of(*evaluation_), zero::sharding_of(config.zero.stage));
  for (const auto& module : {training_, evaluation_})
    if (module) set_device_constants(*module, options.device);
  // The engine compares the model's.
  zero::check_same_program(evaluation_ ? zero::program_of(*evaluation_) : zero::Program(), *comm);
  engine_ = tessera::initialize(training_, config, std::move(comm), options);
  for (at::Tensor& buffer : own_buffers_)  // as the engine does with its own buffers
    buffer.set_data(buffer.to(options.device, buffer.is_floating_point() && config.buffer_dtype
                                                  ? to_torch(*config.buffer_dtype)
                                                  : buffer.scalar_type()));
  for (std::unique_ptr<ScriptFile>* const file : {&training_file_, &evaluation_file_}) {
    if (*file) (*file)->detach();
    file->reset();
  }
  return *engine_;
}

ScriptEngine::~ScriptEngine() = default;  // here, where the module's type is complete

Engine& ScriptEngine::engine() const { return *engine_; }

c10::IValue ScriptEngine::forward(std::vector<c10::IValue> arguments, ForwardMode mode) {
  if (mode == ForwardMode::kTraining || !evaluation_) return engine_->forward(std::move(arguments));
  share_buffers(*evaluation_, engine_->module());  // training may have assigned them anew
  // torch::jit::Module is a handle: for this pass the engine's is set to the other module.
  struct Swap {
    torch::jit::Module &mine, &other;
    Swap(torch::jit::Module& mine, torch::jit::Module& other) : mine(mine), other(other) {
      std::swap(mine, other);
    }
    ~Swap() { std::swap(mine, other); }
  } const swap(engine_->module(), *evaluation_);
  return engine_->forward(std::move(arguments));
}

}  // namespace tessera::examples
