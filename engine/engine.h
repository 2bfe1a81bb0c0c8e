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
#include <ATen/record_function.h>

#include <concepts>
#include <exception>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "engine/accumulation_window.h"
#include "engine/autocast.h"
#include "engine/config/config.h"
#include "engine/inputs.h"
#include "engine/load_weights.h"
#include "engine/optimizer/loss_scaler.h"
#include "engine/optimizer/lr_schedule.h"
#include "engine/optimizer/optimizer_setup.h"
#include "engine/profile/step_profiler.h"
#include "zero/deferred/deferred_model.h"
#include "zero/sharded_model.h"

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn
namespace torch::jit {
struct Module;
}

namespace tessera {

class CheckpointWriter;
class HostFolders;
namespace activations {
class Checkpointing;
}
struct LoadedCheckpoint;  // engine/checkpointing.h
struct LoadOptions;
struct SaveOptions;

struct InitOptions {
  at::Device device = at::kCPU;  ///< where the units live; inputs of forward() are moved there
  Logger log = {};               ///< rank 0's messages: skipped steps and the like
  int local_rank = 0;
  int64_t steps_per_epoch = 0;  ///< optimizer steps an epoch; only schedulers that count epochs need it
  /// Param groups by the parameters' names: a parameter that matches one of a group's patterns has the
  /// group's values in place of the optimizer's options. They come after the config's own param_groups; the
  /// first match wins.
  ///   {.param_groups = {{.match = {"*.bias", "norm*"}, .params = {{"weight_decay", 0.0}}}}}
  std::vector<ParamGroupConfig> param_groups = {};
  /// Names of parameters that keep their values although they require a gradient: an optimizer of the
  /// caller's has them in none of its groups. Their gradients are freed as they come. The same on all ranks.
  std::vector<std::string> untrained = {};
  /// A formula of one's own, in place of the one of the config's optimizer: of that only lr, weight_decay,
  /// param groups and the schedule count then. See zero/optimizer/update_rule.h.
  std::shared_ptr<const zero::UpdateRule> update_rule = nullptr;
  /// An optimizer of whole parameters, in place of the config's: of that only param groups and the schedule
  /// count then, which the caller gives to it. See zero/optimizer/whole_optimizer.h.
  std::shared_ptr<zero::WholeOptimizer> whole_optimizer = nullptr;
  /// false in a process of Python, whose own autograd engine hears of saved tensors.
  bool autograd_hooks = true;
  /// Is used by initialize() with a function that makes the model. Returns whether the values of the
  /// parameter of this name are loaded next (load_weights(), load_checkpoint()). Nobody computes the values
  /// of such parameters, they are zeros until then, and the random generators stay as they are. Unset: none.
  std::function<bool(const std::string& name)> loaded_next = nullptr;
  /// Whether the caller does what steps_per_print, wall_clock_breakdown, memory_breakdown and the monitors'
  /// sections ask for, as Trainer and the Python package do. false: rank 0 warns of those that are set.
  bool caller_reports = false;
};

/// A function without arguments that makes a model: returns a std::shared_ptr of a torch::nn::Module, or a
/// module holder.
template <class T>
concept MakesModel = !requires(const std::remove_cvref_t<T>& holder) {
  holder.ptr();
} && !requires(const std::remove_cvref_t<T>& pointer) { pointer.get(); } && std::invocable<T&>;

/// Trains one rank's part of a model. Used by one thread. Calls marked Collective must be made by all ranks,
/// in the same order.
///
/// The engine owns the model's parameters: at stage 3 they cannot be read after it is destroyed. Each call
/// checks that they are still views of its memory, with the values it wrote there, and throws Error naming
/// the first that is not: see [Note: who writes parameters] in zero/unit/parameter_versions.h. A backward()
/// or an update that fails leaves gradients or parameters incomplete, so every later call throws too, until
/// drop_gradients() or zero_grad() (gradients) or load_checkpoint() (both); other errors leave the engine
/// unchanged.
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;

  /// Collective at stage >= 2 and at the accumulation boundary. Multiplies the loss (a scalar) by loss scale
  /// / accumulation steps, runs backward, and reduces. Throws CommError; Error when the loss is not a
  /// scalar or needs no gradient, in evaluation mode, and when step() is overdue.
  /// `average`: false for a loss that is already divided by the number of accumulation steps.
  ///
  /// loss.backward() in its place does the same, also for tensors of several elements and for a loss over
  /// several engines: gradients are divided by the number of accumulation steps as they come. Its errors are
  /// libtorch's (c10::Error), with the same text. Where the configuration scales the loss it needs
  /// scale(loss).backward(). In evaluation mode, and inside of another engine's backward(), gradients stay in
  /// the parameters' grad().
  void backward(const at::Tensor& loss, bool average = true);
  /// The loss (a scalar) times the loss scale, for a loss.backward() of the caller's. Throws Error.
  at::Tensor scale(const at::Tensor& loss);
  /// Collective. At the accumulation boundary: clips, updates, advances the schedule; otherwise does nothing.
  /// A step whose gradients are not finite is skipped on all ranks alike, and logged. Throws CommError; Error
  /// when that happens at the smallest loss scale allowed.
  void step();
  /// Collective. The micro-steps so far are all of this step: reduces what they have left to the last, and
  /// the next step() updates. Without one it does nothing. Throws CommError.
  void reduce_accumulated();
  /// Collective, between steps; see ShardedModel::apply_to_whole(). Throws Error in the middle of an
  /// accumulation, whose gradients are those of other parameters.
  void apply_to_whole(const std::function<void()>& function);
  /// Whether backward(), step() or an operator has failed, so that calls throw.
  bool has_failed() const { return sharded_->has_failed(); }
  /// Collective. Drops the gradients of this step, all of its micro-steps, and starts it anew: after a
  /// forward or backward() that failed on all ranks alike (an exception of the model's own, no memory), or
  /// a step() in which an optimizer on whole parameters has thrown, which leaves the parameters as they were.
  /// Throws what has failed where that does not help: an update that ended half-way, for which
  /// load_checkpoint() is there, and ranks that are gone.
  void drop_gradients();
  /// The same on all ranks. Frees what lies in grad() of the parameters: gradients that came otherwise
  /// than from this engine's backward(), such as those of another engine's loss that went through this model.
  /// Between backward() and the step() after it, it also discards what has been accumulated since the last
  /// update, as in PyTorch: step() at the boundary then updates nothing. After a step() that does not update,
  /// which keeps what is accumulated, it discards nothing. Collective where has_failed(): then it is
  /// drop_gradients().
  void zero_grad();
  /// Whether the next step() updates.
  bool update_is_due() const { return window_.update_is_due(); }
  /// Whether there are gradients of backward() calls since the last update.
  bool has_gradients() const { return window_.has_gradients(); }
  /// Whether the current micro-step is the last one before an update. A micro-step begins with
  /// engine->forward() (or with step(), where step() is called after every backward) and ends when the next
  /// one begins.
  bool is_gradient_accumulation_boundary() const;
  /// From now on the next backward() is the window's last, or is not, whatever number of accumulation steps
  /// is configured; unset: that number counts again. Inside of no_sync it counts after it. The same on all
  /// ranks. Throws Error where `managed_gradient_accumulation` is false: there each step() is a boundary.
  void set_gradient_accumulation_boundary(std::optional<bool> is_boundary);
  /// Until end_no_sync() backward() only adds up, and step() is an Error; calls may be nested.
  /// `next_is_last`: the first backward() after the outermost one is its window's last. The same on all
  /// ranks. begin_no_sync() throws Error where `managed_gradient_accumulation` is false.
  void begin_no_sync();
  void end_no_sync(bool next_is_last = true) { window_.end_no_sync(next_is_last); }
  bool in_no_sync() const { return window_.in_no_sync(); }

  /// Collective. Both set the mode of the module and its submodules; eval() also copies rank 0's buffers to
  /// all ranks.
  void train();
  void eval();

  /// Collective. fp32 copy of a whole parameter (its master weights) / of the gradient accumulated for it
  /// (mean over the global batch, unscaled, before clipping), by the model's name. There are gradients
  /// from a backward() on, of the micro-steps so far, until the next step begins. Throws Error for an unknown
  /// name, or when there is no gradient.
  at::Tensor full_parameter(const std::string& name) { return sharded_->full_parameter(name); }
  at::Tensor full_gradient(const std::string& name);
  /// Collective. Set them; the gradient between the backward() at the accumulation boundary and step(), which
  /// clips and updates with it. `value`: the parameter's shape; rank 0's counts. Throws Error for an unknown
  /// name, another shape, a frozen parameter's gradient, and where there is no gradient.
  void set_full_parameter(const std::string& name, const at::Tensor& value);
  void set_full_gradient(const std::string& name, const at::Tensor& value);

  /// Collective. Saves all that training needs to resume to DIRECTORY/TAG, a folder that all ranks share
  /// (default tag: "global_step" and the number of steps taken), and writes TAG into DIRECTORY/latest:
  /// completely, or not at all. Gradients are not saved: of a step under
  /// way its beginning is. Not between the last backward() of a step and step(). With `checkpoint.async` it
  /// returns after a copy, and a failed write is logged at a later step. `client_state`: rank 0's is kept.
  /// Returns DIRECTORY/TAG. Throws CheckpointError, the same on all ranks, and Error where an earlier call
  /// has failed on any; the engine and older checkpoints are unchanged.
  std::string save_checkpoint(const std::string& directory, const std::string& tag = "");
  std::string save_checkpoint(const std::string& directory, const std::string& tag,
                              const nlohmann::json& client_state);
  /// The same; SaveOptions is in engine/checkpointing.h.
  std::string save_checkpoint(const std::string& directory, const std::string& tag,
                              const nlohmann::json& client_state, const SaveOptions& options);
  /// Collective. Saves the same into each host's folder in memory (engine/checkpoint/host_folders.h), from
  /// which ranks that a launcher starts again continue (docs/launching.md, Restarts). It is written before
  /// the call returns, and replaces what the last call has saved there, once it is complete. Throws
  /// CheckpointError, the same on all ranks; the engine and what was saved are unchanged.
  void save_in_memory(HostFolders& folders, const nlohmann::json& client_state);
  /// Collective. Loads DIRECTORY/TAG (default: the tag in DIRECTORY/latest), saved with any stage, number of
  /// ranks, unit size and precision. Gradients of a step under way are dropped, and an engine whose
  /// backward() or step() has failed on all ranks can be used again; each rank reads what it needs. Random
  /// numbers continue on the ranks that the saving run had, too. Throws CheckpointError, also where ranks
  /// have opened other content, and Error where a rank's parameters were written outside of it: the same on
  /// all ranks, before anything has changed. LoadOptions and LoadedCheckpoint are in engine/checkpointing.h.
  LoadedCheckpoint load_checkpoint(const std::string& directory, const std::string& tag = "");
  LoadedCheckpoint load_checkpoint(const std::string& directory, const std::string& tag,
                                   const LoadOptions& options);
  /// Collective. Loads parameters and buffers from a .safetensors file, or a folder or index of them, in any
  /// precision; or from what another program has saved (docs/migrating.md). One name of a tied parameter is
  /// enough. Throws CheckpointError, the same on all ranks, before anything has changed.
  void load_weights(const std::string& path, const LoadWeightsOptions& options = {});
  /// Waits for an asynchronous save. Throws the last save's CheckpointError, logged or not, once and
  /// the same on all ranks.
  void finish_checkpoint();
  /// Waits for an asynchronous save. Whether the last one has failed, which is then logged. Equal on
  /// all ranks.
  bool last_save_failed();
  /// Collective before the first save. Tags that `checkpoint.keep_last` neither counts nor deletes from now
  /// on; rank 0's count.
  void keep_checkpoints(const std::vector<std::string>& tags);

  /// Asks all ranks to stop; the request travels with the next step() that updates, at no cost.
  void request_stop() { stop_requested_ = true; }
  /// Equal on all ranks: whether some rank had called request_stop() before the last step() that updates.
  bool should_stop() const { return should_stop_; }

  int64_t global_steps() const { return global_steps_; }    ///< optimizer steps taken or skipped
  int64_t skipped_steps() const { return skipped_steps_; }  ///< of these, skipped for non-finite gradients
  int64_t micro_steps() const { return micro_steps_; }      ///< calls of backward()
  /// Updates that the configured schedule has counted: those applied, unless load_checkpoint() has left the
  /// schedule where it was.
  int64_t schedule_steps() const { return schedule_steps_; }
  /// Moves the configured schedule there. The same on all ranks. Throws Error for a negative number.
  void set_schedule_steps(int64_t steps);
  /// Returns the rates of the next step, by param group: [0] for parameters in no group, then the config's
  /// groups, then InitOptions'.
  std::vector<double> learning_rates() const;
  /// Returns the betas of the next step, by param group, where the configured schedule sets them (OneCycle).
  std::vector<std::optional<Betas>> scheduled_betas() const;
  /// Returns the param groups with these rates and betas.
  std::vector<kernels::Hyper> next_groups() const;
  /// Sets the hyper-parameters of a param group for the next updates. Its rate has no effect:
  /// set_learning_rates() sets it; neither have betas that the configured schedule sets. A torch::optim
  /// optimizer that runs as it is has options of its own. The same on all ranks. Throws Error, and changes
  /// nothing, for what needs a state that was not made at initialize(), for what would change what a state
  /// means, for a number that is not finite, and for a group that there is not.
  void set_hyper(size_t group, const kernels::Hyper& hyper);
  /// Rates by param group from now on, in place of the configured schedule's: for a schedule of the
  /// caller's. The same on all ranks. Throws Error for another number of rates than param groups, and for one
  /// that is not finite.
  void set_learning_rates(std::vector<double> rates);
  /// The configured schedule's rates again; without one, an optimizer that runs as it is keeps those that its
  /// groups have. The same on all ranks.
  void use_configured_rates() { set_rates_.reset(); }
  double loss_scale() const { return scaler_.scale(); }
  /// Returns the factor by which the accumulated gradients are multiplied: the last backward()'s loss scale.
  double gradient_scale() const { return gradient_scale_; }
  /// Global L2 norm at the last step, unscaled, before clipping.
  double gradient_norm() const { return gradient_norm_; }

  int rank() const { return comm_->rank(); }
  int local_rank() const { return options_.local_rank; }
  int world_size() const { return comm_->size(); }
  at::Device device() const { return options_.device; }
  const EngineConfig& config() const { return config_; }
  /// Bytes of model state that this rank holds between steps: measured from its tensors, and by the
  /// formula.
  /// `tier`: what of it is in memory, or on disk.
  zero::StateBytes measured_bytes(zero::Tier tier = zero::Tier::kDevice) const;
  zero::StateBytes formula_bytes(zero::Tier tier = zero::Tier::kDevice) const {
    return sharded_->formula_bytes(config_.checkpoint.async, tier);
  }
  /// Returns the bytes of the host's memory that are page-locked: offloaded state with the buffers that it
  /// passes through, and what asynchronous checkpoints are written from.
  int64_t pinned_bytes() const;
  comm::Communicator& comm() { return *comm_; }
  zero::ShardedModel& sharded_model() { return *sharded_; }
  /// Model FLOPs of one optimizer step of this rank, once `flops_profiler` has counted them.
  const std::optional<Flops>& flops() const { return profiler_->flops(); }
  /// What is recomputed in backward; null: nothing is.
  const activations::Checkpointing* activations() const { return activations_.get(); }

 protected:
  Engine(const zero::ModelView& model, const EngineConfig& config, comm::CommunicatorPtr comm,
         const InitOptions& options);
  virtual void set_training(bool training) = 0;
  /// The parameters the model has now; unset when they are the tensors of `before`.
  virtual std::optional<std::vector<zero::NamedTensor>> changed_parameters(
      const std::vector<zero::NamedTensor>& before) const = 0;

  /// Surrounds the model's forward: it sets autocast, and the order of use in evaluation.
  class ForwardScope {
   public:
    explicit ForwardScope(Engine& engine);
    /// What an operator could not read is thrown as the error that it is, and not in libtorch's words.
    template <class Function>
    auto run(const Function& function) {
      try {
        return function();
      } catch (const std::exception&) {
        engine_.sharded_->residency().rethrow();
        throw;
      }
    }
    /// Collective in evaluation. `result`: what the forward returns, where it may hold tensors. Throws what
    /// went wrong inside operators.
    template <class T>
    void finish(const T& result) {
      engine_.watch(result);
      finish();
    }
    void finish();

   private:
    Engine& engine_;
    AutocastScope autocast_;
    at::RecordFunction named_;  // in traces
  };

  /// A backward that reaches one of the tensors, which the forward has returned, is followed to its end.
  template <class T>
  void watch(const T& result) {
    if constexpr (HoldsTensors<T>::value)
      if (at::GradMode::is_enabled())
        convert_tensors(result, [this](const at::Tensor& tensor) { return watch_tensor(tensor), tensor; });
  }
  void watch_tensor(const at::Tensor& tensor);

  /// Throws Error naming the first parameter by which `now`, those that the model has, differ from
  /// the engine's.
  void check_same_parameters(const std::vector<zero::NamedTensor>& now) const;

  /// Tensors go to the device, floating ones in the compute dtype when that is bf16 or fp16 (or the
  /// parameters all are); those in standard containers and IValues too. Everything else stays as it is.
  at::Tensor prepare_tensor(const at::Tensor& input) const;
  template <class T>
  decltype(auto) prepare(T&& input) const {
    if constexpr (HoldsTensors<std::decay_t<T>>::value) {
      return convert_tensors(std::as_const(input),
                             [this](const at::Tensor& tensor) { return prepare_tensor(tensor); });
    } else {
      return std::forward<T>(input);
    }
  }

 private:
  void check_same_config_everywhere() const;
  void refuse_unscaled_fp16() const;
  std::optional<at::ScalarType> input_dtype() const;
  void log_muon() const;
  void warn_unmoved_momentum() const;
  bool has_betas() const;
  void warn_unmatched_patterns() const;
  void warn_unused_reports() const;
  void set_up_activations();
  void report_activations();
  void check_managed() const;
  at::Tensor value_to_set(std::string_view call, const std::string& name, const at::Tensor& value);
  zero::MicroStep begin_micro_step(bool callers);
  void follow_callers_backward(bool before_gradients);
  void end_with_this_backward();
  void begin_callers_backward();
  void end_callers_backward();
  void update();
  void check_usable_on_all_ranks(std::string_view call) const;
  void check_momentum() const;
  bool steps_by_groups() const;
  double clip_coefficient(double norm) const;
  std::string optimizer_name() const;
  void report_skipped_step(const zero::GradientSummary& summary);
  CheckpointWriter& checkpoint_writer();
  std::shared_ptr<comm::HostTransfer> page_locked_transfer() const;
  std::string save_with(CheckpointWriter& writer, const std::string& directory, const std::string& tag,
                        const nlohmann::json& client_state, const SaveOptions& options);

  EngineConfig config_;
  comm::CommunicatorPtr comm_;
  InitOptions options_;
  std::shared_ptr<comm::HostTransfer> host_transfer_;  ///< see engine_internal.h
  LossScaler scaler_;
  OptimizerSetup optimizer_;  ///< at the start: schedules change the rates in sharded_
  LrSchedule schedule_;
  std::vector<zero::NamedTensor> parameters_;
  std::unique_ptr<zero::ShardedModel> sharded_;
  std::unique_ptr<activations::Checkpointing> activations_;  ///< refers to sharded_
  std::unique_ptr<CheckpointWriter> checkpoint_writer_;      ///< refers to sharded_
  std::unique_ptr<StepProfiler> profiler_;
  /// Is the type of forward()'s floating inputs; unset: they stay as they are.
  std::optional<at::ScalarType> input_dtype_;

  AccumulationWindow window_;
  int64_t micro_steps_ = 0;
  int64_t schedule_steps_ = 0;
  int64_t global_steps_ = 0, skipped_steps_ = 0;
  /// Autograd has it until the end of the loss.backward(), where it calls end_callers_backward().
  std::weak_ptr<bool> followed_;
  bool loss_scaled_ = false;  ///< scale() was called for the loss.backward() that is to come
  std::shared_ptr<Engine*> alive_ = std::make_shared<Engine*>(this);  ///< hooks of tensors may outlive it
  bool stop_requested_ = false, should_stop_ = false;
  std::optional<std::vector<double>> set_rates_;  ///< in place of the schedule's
  double gradient_norm_ = 0;
  double gradient_scale_ = 1;  ///< loss scale by which the accumulated gradients are multiplied
};

/// An Engine with the model's type, and so with its forward().
template <class Model>
class TypedEngine final : public Engine {
 public:
  TypedEngine(std::shared_ptr<Model> model, const EngineConfig& config, comm::CommunicatorPtr comm,
              const InitOptions& options, zero::DeferredModel* deferred = nullptr)
      : Engine(zero::view_of(*model, deferred), config, std::move(comm), options), model_(std::move(model)) {
    // Only then: submodules that were put into evaluation mode one by one stay in it.
    if (!model_->is_training()) set_training(true);
  }

  /// Collective at stage 3. The model's own forward, under autocast when configured; tensors among the
  /// arguments are moved to the device, and cast to the compute dtype when they are floating. A TorchScript
  /// module takes its arguments one by one or as a std::vector<c10::IValue>. In evaluation all ranks must
  /// call it equally often. Throws CommError.
  template <class... Args>
  auto forward(Args&&... args) {
    ForwardScope scope(*this);
    auto result = scope.run([&] { return call(prepare(std::forward<Args>(args))...); });
    scope.finish(result);
    return result;
  }

  Model& module() { return *model_; }

 private:
  template <class... Args>
  auto call(Args&&... args) {
    if constexpr (!std::is_same_v<Model, torch::jit::Module>) {
      return model_->forward(std::forward<Args>(args)...);
    } else if constexpr (sizeof...(Args) == 1 &&
                         (std::is_same_v<std::decay_t<Args>, std::vector<c10::IValue>> && ...)) {
      return model_->forward(std::forward<Args>(args)...);
    } else {
      return model_->forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
    }
  }

  void set_training(bool training) override { model_->train(training); }
  std::optional<std::vector<zero::NamedTensor>> changed_parameters(
      const std::vector<zero::NamedTensor>& before) const override {
    if (zero::holds(*model_, before)) return std::nullopt;
    return zero::parameters_of(*model_);
  }
  std::shared_ptr<Model> model_;
};

/// Collective. Moves the model's parameters into units (the model is used as before) and makes the engine.
/// All ranks pass the same model and config; parameters and buffers get rank 0's values. Throws ConfigError,
/// CommError.
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
/// Collective. The same of a model that `make` makes, without ever having it in memory as a whole: its
/// parameters get their values unit by unit, the same as when `make` is called by itself, and so does the
/// state of the random generators ([Note: making a model without memory] in zero/deferred/deferred_model.h).
/// `make` may be called twice. `counts`: what was done. Throws what `make` throws, too.
template <MakesModel Make>
auto initialize(Make&& make, const EngineConfig& config, comm::CommunicatorPtr comm,
                const InitOptions& options = {}, zero::MakingCounts* counts = nullptr) {
  decltype(make()) made{nullptr};
  zero::DeferredModel deferred(comm->rank() == 0 ? options.log : Logger());
  deferred.make([&] {
    made = nullptr;  // a first attempt's
    made = make();
  });
  const auto model = [&] {
    if constexpr (requires { made.ptr(); })
      return made.ptr();
    else
      return std::move(made);
  }();
  made = nullptr;
  using Model = std::remove_cvref_t<decltype(model)>::element_type;
  auto engine = std::make_unique<TypedEngine<Model>>(model, config, std::move(comm), options, &deferred);
  if (counts != nullptr) *counts = deferred.counts();
  return engine;
}
/// TorchScript. Include torch/csrc/jit/api/module.h (or torch/script.h) where it is used.
std::unique_ptr<TypedEngine<torch::jit::Module>> initialize(const torch::jit::Module& model,
                                                            const EngineConfig& config,
                                                            comm::CommunicatorPtr comm,
                                                            const InitOptions& options = {});

}  // namespace tessera
