// Engine: forward, backward, step over a sharded model. The one class a training loop talks to.
//
//   auto config = tessera::load_engine_config("ds_config.json", {.world_size = comm->size()});
//   auto engine = tessera::initialize(model, config, comm);
//   for (auto& [x, y] : batches) {
//     auto loss = engine->forward(x, y);  // or model->forward(x, y)
//     engine->backward(loss);
//     engine->step();
//   }
//
// Names and meaning follow deepspeed.DeepSpeedEngine.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "engine/autocast.h"
#include "engine/config.h"
#include "engine/loss_scaler.h"
#include "engine/lr_schedule.h"
#include "zero/sharded_model.h"

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}

namespace tessera {

struct InitOptions {
  at::Device device = at::kCPU;  ///< where the units live; inputs of forward() are moved there
  Logger log;                    ///< rank 0's messages: skipped steps and the like
  int local_rank = 0;
  int64_t steps_per_epoch = 0;  ///< optimizer steps an epoch; only schedulers that count epochs need it
};

/// One rank's engine. Used by one thread. Calls marked Collective must be made by all ranks, in the same order.
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;

  /// Collective at stage >= 2 and at the accumulation boundary. Multiplies the loss (a scalar) by loss scale /
  /// accumulation steps, runs backward, and reduces. Throws CommError; Error when the loss is not a scalar.
  void backward(const at::Tensor& loss);
  /// Collective. At the accumulation boundary: clips, updates, advances the schedule; otherwise does nothing.
  /// A step whose gradients are not finite is skipped on all ranks alike, and logged. Throws CommError.
  void step();
  /// Whether the micro-step under way is the last one before an update.
  bool is_gradient_accumulation_boundary() const;

  /// Collective. eval() makes rank 0's buffers everybody's; both set the module's mode.
  void train();
  void eval();

  /// Collective. fp32 copy of a whole parameter / of the gradient accumulated for it (unscaled, before clipping), by the
  /// model's name. Throws Error for an unknown name.
  at::Tensor full_parameter(const std::string& name) { return sharded_->full_parameter(name); }
  at::Tensor full_gradient(const std::string& name);

  int64_t global_steps() const { return global_steps_; }    ///< optimizer steps taken or skipped
  int64_t skipped_steps() const { return skipped_steps_; }  ///< of these, skipped for non-finite gradients
  int64_t micro_steps() const { return micro_steps_; }      ///< calls of backward()
  std::vector<double> learning_rates() const;               ///< of the next step, by param group
  double loss_scale() const { return scaler_.scale(); }
  double gradient_norm() const { return gradient_norm_; }  ///< global L2 norm at the last step, unscaled, before clipping

  int rank() const { return comm_->rank(); }
  int local_rank() const { return options_.local_rank; }
  int world_size() const { return comm_->size(); }
  at::Device device() const { return options_.device; }
  const EngineConfig& config() const { return config_; }
  comm::Communicator& comm() { return *comm_; }
  zero::ShardedModel& sharded_model() { return *sharded_; }

 protected:
  Engine(const zero::ModelView& model, const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options);
  virtual void set_training(bool training) = 0;

  /// Around the model's forward: autocast, and the order of use in evaluation.
  class ForwardScope {
   public:
    explicit ForwardScope(Engine& engine);
    void finish();  ///< Collective in evaluation. Throws what went wrong inside operators.

   private:
    Engine& engine_;
    AutocastScope autocast_;
  };

  /// Tensors go to the device, floating ones in the compute dtype; everything else stays as it is.
  at::Tensor prepare(const at::Tensor& input) const;
  std::vector<c10::IValue> prepare(std::vector<c10::IValue> inputs) const;
  template <class T>
  decltype(auto) prepare(T&& other) const {
    if constexpr (std::is_same_v<std::decay_t<T>, at::Tensor>) {
      return prepare(static_cast<const at::Tensor&>(other));
    } else {
      return std::forward<T>(other);
    }
  }

 private:
  bool at_boundary() const { return micro_steps_in_window_ == config_.gradient_accumulation_steps; }
  void set_rates();
  double clip_coefficient(double norm) const;
  void skip_step(const zero::GradientSummary& summary);

  EngineConfig config_;
  comm::CommunicatorPtr comm_;
  InitOptions options_;
  LossScaler scaler_;
  std::vector<kernels::Hyper> base_groups_;
  LrSchedule schedule_;
  std::unique_ptr<zero::ShardedModel> sharded_;

  bool training_ = true;
  bool stepped_ = true;  ///< step() was called after the last backward()
  int64_t micro_steps_ = 0, micro_steps_in_window_ = 0;
  int64_t global_steps_ = 0, skipped_steps_ = 0;
  double gradient_norm_ = 0;
  double gradient_scale_ = 1;  ///< loss scale the accumulated gradients carry
};

/// An Engine that also knows the model's type, and so what forward takes and returns.
template <class Model>
class TypedEngine final : public Engine {
 public:
  TypedEngine(std::shared_ptr<Model> model, const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options)
      : Engine(zero::view_of(*model), config, std::move(comm), options), model_(std::move(model)) {
    set_training(true);
  }

  /// Collective at stage 3. The model's own forward, under autocast when configured. In evaluation all ranks must
  /// call it equally often. Throws CommError.
  template <class... Args>
  auto forward(Args&&... args) {
    ForwardScope scope(*this);
    auto result = model_->forward(prepare(std::forward<Args>(args))...);
    scope.finish();
    return result;
  }

  Model& module() { return *model_; }

 private:
  void set_training(bool training) override { model_->train(training); }
  std::shared_ptr<Model> model_;
};

/// Collective. Moves the model's parameters into units (the model is used as before) and makes the engine. All ranks
/// pass the same model and config; parameters and buffers become rank 0's. Throws ConfigError, CommError.
template <class Model>
std::unique_ptr<TypedEngine<Model>> initialize(std::shared_ptr<Model> model, const EngineConfig& config,
                                               comm::CommunicatorPtr comm, const InitOptions& options = {}) {
  return std::make_unique<TypedEngine<Model>>(std::move(model), config, std::move(comm), options);
}
template <class Contained>
std::unique_ptr<TypedEngine<Contained>> initialize(const torch::nn::ModuleHolder<Contained>& model,
                                                   const EngineConfig& config, comm::CommunicatorPtr comm,
                                                   const InitOptions& options = {}) {
  return initialize(model.ptr(), config, std::move(comm), options);
}

}  // namespace tessera
