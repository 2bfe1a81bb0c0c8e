#include "engine/engine.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

#include "activations/checkpointing.h"
#include "comm/init/agreement.h"
#include "comm/memory/cuda_host_transfer.h"
#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/batch_norm.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/config/parse.h"
#include "engine/config/sharding_plan.h"
#include "engine/engine_internal.h"
#include "engine/optimizer/optimizer_setup.h"
#include "engine/same_config.h"
#include "zero/optimizer/whole_formula.h"

namespace tessera {
namespace {

std::vector<double> rates_of(const std::vector<kernels::Hyper>& groups) {
  std::vector<double> rates;
  for (const kernels::Hyper& group : groups) rates.push_back(group.lr);
  return rates;
}

EngineConfig completed(EngineConfig config, const InitOptions& options, int world_size) {
  std::vector<ParamGroupConfig>& groups = config.optimizer.param_groups;
  groups.insert(groups.end(), options.param_groups.begin(), options.param_groups.end());
  if (options.update_rule && options.whole_optimizer)
    throw ConfigError("InitOptions has update_rule beside whole_optimizer; expected one of the two");
  return validated(config, world_size);
}

/// What state below the device's memory needs.
void set_up_offload(const ZeroConfig& zero, const InitOptions& init, zero::ShardedModelOptions& options) {
  const zero::Tiers& tiers = options.tiers;
  const bool optimizer = tiers.optimizer == zero::Tier::kDisk;
  const bool parameters = tiers.parameters == zero::Tier::kDisk;
  options.offload.directory =
      (optimizer ? zero.offload_optimizer : zero.offload_param).nvme_path.value_or("");
  options.offload.num_buffers = (optimizer ? 2 * zero.offload_optimizer.buffer_count : 0) +
                                (parameters ? zero.offload_param.buffer_count : 0);
  if (!tiers.device_memory_is_separate || !tiers.any_below_device()) return;
  const bool pin = zero.offload_optimizer.pin_memory || zero.offload_param.pin_memory;
  const std::shared_ptr<comm::HostTransfer>& transfer = ScopedHostTransfer::current();
  options.transfer = transfer ? transfer : comm::make_cuda_host_transfer(init.device, pin);
}

zero::ShardedModelOptions sharding_options(const EngineConfig& config, const InitOptions& init,
                                           const OptimizerSetup& optimizer, int world_size,
                                           std::function<void()> on_gradient_outside) {
  const ZeroConfig& zero = config.zero;
  const ShardingPlan plan =
      plan_sharding(config, world_size, !init.device.is_cpu() || ScopedHostTransfer::current() != nullptr);
  zero::ShardedModelOptions options;
  options.sharding = plan.sharding;
  options.groups = plan.groups;
  options.tiers = plan.tiers;
  options.compute_dtype = plan.compute;
  options.buffer_dtype = config.buffer_dtype;
  options.device = init.device;
  options.unit_numel = plan.unit_numel;
  options.residency.track_casts = config.autocast.enabled;
  options.reducer.accumulate_dtype = to_torch(plan.accumulate);
  options.reducer.communicate_dtype = to_torch(plan.communicate);
  options.reducer.reduce_each_micro_step = zero.reduce_each_micro_step;
  options.reducer.overlap = zero.overlap_comm;
  options.reducer.num_slots = zero.communication_buffers;
  options.reducer.predivide_factor = config.gradient_predivide_factor;
  options.reducer.prescale = config.prescale_gradients;
  options.reducer.sum = config.gradient_allreduce_op == "sum";
  options.reducer.log = init.log;
  options.reducer.on_gradient_outside = std::move(on_gradient_outside);
  options.residency.overlap = zero.overlap_comm;
  options.residency.capacity_units = zero.communication_buffers;
  options.residency.max_live_numel = zero.max_live_parameters;
  options.residency.prefetch_numel = zero.prefetch_bucket_size;
  options.residency.persistence_numel = zero.param_persistence_threshold;
  options.residency.log = init.log;
  options.optimizer = {optimizer.kind, optimizer.groups, init.update_rule, init.whole_optimizer};
  options.group_of = [group_of = optimizer.group_of,
                      untrained = std::unordered_set<std::string>(
                          init.untrained.begin(), init.untrained.end())](const std::string& name) {
    return untrained.contains(name) ? zero::ShardedModelOptions::kUntrained : group_of(name);
  };
  options.loaded_next = init.loaded_next;
  set_up_offload(zero, init, options);
  if (init.whole_optimizer && options.transfer)
    throw ConfigError(init.whole_optimizer->name(),
                      " updates whole parameters on the device, and zero_optimization.offload_optimizer "
                      "has them updated on the host; expected no offload, or an optimizer of the "
                      "configuration");
  return options;
}

}  // namespace

Engine::Engine(const zero::ModelView& model, const EngineConfig& config, comm::CommunicatorPtr comm,
               const InitOptions& options)
    : config_(completed(config, options, comm->size())),
      comm_(std::move(comm)),
      options_(options),
      host_transfer_(ScopedHostTransfer::current()),
      scaler_(config_),
      optimizer_(set_up_optimizer(config_.optimizer)),
      schedule_(config_.scheduler, rates_of(optimizer_.groups), options.steps_per_epoch),
      parameters_(model.parameters),
      window_(config_.gradient_accumulation_steps, config_.managed_gradient_accumulation) {
  if (kernels::updates_whole_parameters(optimizer_.kind) && !options_.whole_optimizer &&
      !options_.update_rule)
    options_.whole_optimizer = zero::make_whole_formula(optimizer_.kind, type_of(config_.optimizer.options));
  if (config_.compute_dtype() != DType::kFloat32) let_batch_norm_widen_parameters();
  check_same_config_everywhere();
  warn_unmatched_patterns();
  warn_unused_reports();
  refuse_unscaled_fp16();
  sharded_ = std::make_unique<zero::ShardedModel>(
      model, comm_,
      sharding_options(config_, options_, optimizer_, comm_->size(), [this] { begin_callers_backward(); }));
  log_muon();
  warn_unmoved_momentum();
  set_up_activations();
  input_dtype_ = input_dtype();
  if (config_.checkpoint.async) checkpoint_writer();
  profiler_ = std::make_unique<StepProfiler>(config_.flops_profiler, config_.profiler, options_.device,
                                             rank(), options_.log);
}

Engine::~Engine() = default;

/// Compares all keys but those that may differ between ranks when only the engine reads them.
void Engine::check_same_config_everywhere() const {
  nlohmann::ordered_json shared = config::write_engine_config(config_);
  for (const char* key : {"seed", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
                          "flops_profiler", "profiler"})
    shared.erase(key);
  if (options_.update_rule)
    shared["update_rule"] = {{"name", options_.update_rule->name()},
                             {"states", options_.update_rule->state_names()}};
  if (const zero::WholeOptimizer* whole = options_.whole_optimizer.get())
    shared["optimizer of whole parameters"] = {{"name", whole->name()},
                                               {"on_one_rank", whole->on_one_rank()}};
  check_same_config(*comm_, shared);
}

/// Which parameters are matrices of Muon's depends on shapes and names.
void Engine::log_muon() const {
  const std::vector<bool>& by_muon = sharded_->optimizer().by_muon();
  if (rank() != 0 || by_muon.empty()) return;
  int64_t matrices = 0, in_matrices = 0, others = 0, in_others = 0;
  for (size_t i = 0; i < by_muon.size(); ++i) {
    const zero::ParameterSpec& parameter = sharded_->layout().parameters()[i];
    if (!parameter.trainable) continue;
    (by_muon[i] ? matrices : others) += 1;
    (by_muon[i] ? in_matrices : in_others) += parameter.numel();
  }
  if (matrices == 0 && others > 0)
    options_.log.warning("optimizer: no parameter is a matrix of Muon's; AdamW updates all");
  if (matrices > 0)
    options_.log.info(str("Muon: ", matrices, " of the parameters (", in_matrices,
                          " elements); AdamW: ", others, " (", in_others, ")"));
}

/// OneCycle moves betas; as in DeepSpeed, an optimizer without them trains without that.
void Engine::warn_unmoved_momentum() const {
  const auto* const cycle = std::get_if<OneCycleOptions>(&config_.scheduler);
  if (rank() == 0 && cycle && cycle->cycle_momentum && !has_betas())
    options_.log.warning(
        str("scheduler.params.cycle_momentum has no effect on ", type_of(config_.optimizer.options)));
}

/// Whether the optimizer has betas that a schedule moves.
bool Engine::has_betas() const {
  if (!sharded_->optimizer().by_muon().empty()) return false;
  return std::visit([](const auto& options) { return requires { options.beta1; }; },
                    config_.optimizer.options);
}

/// A pattern that matches nothing is most often a typing mistake, and so is a name.
void Engine::warn_unmatched_patterns() const {
  if (rank() != 0) return;
  std::unordered_set<std::string> names;
  for (const zero::NamedTensor& parameter : parameters_) names.insert(parameter.name);
  for (const ParamGroupConfig& group : config_.optimizer.param_groups) {
    for (const std::string& name : group.parameters)
      if (!names.contains(name))
        options_.log.warning(str("optimizer.param_groups: the model has no parameter \"", name, "\""));
    for (const std::string& pattern : group.match)
      if (std::none_of(parameters_.begin(), parameters_.end(), [&](const zero::NamedTensor& parameter) {
            return glob_match(pattern, parameter.name);
          }))
        options_.log.warning(
            str("optimizer.param_groups: no parameter of the model matches \"", pattern, "\""));
  }
  for (const std::string& name : options_.untrained)
    if (!names.contains(name))
      options_.log.warning(str("InitOptions::untrained: the model has no parameter \"", name, "\""));
}

/// Warns of settings that a loop of the caller's own has to follow itself.
void Engine::warn_unused_reports() const {
  if (rank() != 0) return;
  if (config_.dump_state) options_.log.info("configuration:\n" + dump_resolved(config_));
  if (options_.autograd_hooks && config_.zero.leaf_module != LeafModuleConfig{})
    options_.log.warning("zero_optimization.leaf_module: no effect outside of Python");
  if (options_.caller_reports) return;
  std::vector<std::string> unused;
  const auto add = [&](bool is_set, const char* key) {
    if (is_set) unused.emplace_back(key);
  };
  add(config_.wall_clock_breakdown, "wall_clock_breakdown");
  add(config_.memory_breakdown, "memory_breakdown");
  add(config_.monitors.tensorboard.enabled, "tensorboard");
  add(config_.monitors.csv.enabled, "csv_monitor");
  add(config_.monitors.jsonl.enabled, "jsonl_monitor");
  add(config_.monitors.mlflow.enabled, "mlflow");
  if (!unused.empty())
    options_.log.warning(str(join(unused, ", "),
                             ": no effect in a training loop of one's own, which reports its numbers itself "
                             "(docs/monitoring.md, In a loop of your own)"));
}

/// Where neither bf16 nor fp16 is enabled, parameters keep their dtypes ([Note:
/// dtypes] in zero/sharded_model.h).
void Engine::refuse_unscaled_fp16() const {
  if (config_.scales_loss() || config_.bf16) return;
  for (const zero::NamedTensor& parameter : parameters_)
    if (parameter.tensor.requires_grad() && parameter.tensor.scalar_type() == at::kHalf)
      throw ConfigError("parameter ", parameter.name,
                        " is trainable and fp16, whose gradients need a loss scale: enable fp16, or "
                        "make it fp32 or bf16 before initialize()");
}

std::optional<at::ScalarType> Engine::input_dtype() const {
  if (config_.compute_dtype() != DType::kFloat32) return to_torch(config_.compute_dtype());
  std::set<DType> found;  // beside those of quantized weights, which nothing is computed in
  for (const zero::UnitSpec& unit : sharded_->layout().units())
    if (is_compute_type(unit.dtype)) found.insert(unit.dtype);
  if (found.size() != 1 || *found.begin() == DType::kFloat32 || config_.autocast.enabled) return std::nullopt;
  return to_torch(*found.begin());
}

/// The module may have been given other tensors, which would not be trained.
void Engine::check_same_parameters(const std::vector<zero::NamedTensor>& now) const {
  using zero::NamedTensor;
  const auto named = [](const std::vector<NamedTensor>& list, const std::string& name) {
    return std::find_if(list.begin(), list.end(),
                        [&](const NamedTensor& parameter) { return parameter.name == name; });
  };
  const auto refuse = [](const std::string& name, const char* what) {
    throw Error("parameter ", name, " ", what,
                " after initialize(), and would not be trained: call initialize() on the model in its "
                "final form. Give values with load_weights(), or inside a GatheredParameters with "
                "modifier_rank set");
  };
  for (const NamedTensor& before : parameters_) {
    const auto found = named(now, before.name);
    if (found == now.end()) refuse(before.name, "was removed from the model");
    if (!found->tensor.is_same(before.tensor)) refuse(before.name, "was replaced by another tensor");
  }
  for (const NamedTensor& parameter : now)
    if (named(parameters_, parameter.name) == parameters_.end()) refuse(parameter.name, "was registered");
}

// ----------------------------------------------------------------------------------------- the step

static void check_scalar(const char* call, const at::Tensor& loss, const char* advice) {
  if (loss.defined() && loss.numel() == 1) return;
  throw Error(
      call, "() needs a scalar loss, found ",
      loss.defined() ? str("a tensor of ", loss.numel(), " elements") : std::string("an undefined tensor"),
      advice);
}

/// In fp32 at least: in fp16 a loss scale alone may overflow.
static at::Tensor times(const at::Tensor& loss, double factor) {
  if (factor == 1) return loss;
  return (at::isReducedFloatingType(loss.scalar_type()) ? loss.to(at::kFloat) : loss) * factor;
}

/// Counts the engines that run backward() now.
class OwnBackward {
 public:
  OwnBackward() { ++num_in_process, ++num_on_thread; }
  ~OwnBackward() { --num_in_process, --num_on_thread; }
  OwnBackward(const OwnBackward&) = delete;
  /// Whether the hook that asks runs inside of one. Those of CUDA tensors run on a thread of autograd's.
  static bool runs(at::Device device) {
    return (device.is_cpu() ? num_on_thread : num_in_process.load()) > 0;
  }

 private:
  static inline std::atomic<int> num_in_process{0};
  static inline thread_local int num_on_thread = 0;
};

/// Calls a function before a node of the graph runs, each time.
class BeforeNode : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeNode(std::function<void()> function) : function_(std::move(function)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    function_();
    return gradients;
  }

 private:
  const std::function<void()> function_;
};

/// The place of the backward that begins now. `callers`: it is loss.backward().
zero::MicroStep Engine::begin_micro_step(bool callers) {
  const bool first = window_.next_is_first();
  if (first) {
    if (const auto changed = changed_parameters(parameters_)) check_same_parameters(*changed);
  } else if (window_.mixes(callers)) {
    throw Error(
        "engine.backward(loss) and loss.backward() in one accumulation of gradients: expected one of them "
        "for "
        "all of its micro-steps");
  }
  gradient_scale_ = scaler_.scale();
  ++micro_steps_;
  window_.begin_backward(callers);
  return {.first = first, .last = window_.is_complete()};
}

void Engine::backward(const at::Tensor& loss, bool average) {
  RECORD_USER_SCOPE("tessera.backward");
  sharded_->check_usable();
  check_scalar("backward", loss, ": reduce it first, e.g. with mean()");
  if (!loss.requires_grad())
    throw Error(
        "backward() needs a loss that depends on the parameters; was it computed under NoGradGuard, or "
        "detached?");
  if (!sharded_->training()) throw Error("backward() in evaluation mode: call train() first");
  if (window_.is_complete())
    throw Error("backward() at the accumulation boundary: call step() after the last backward()");
  sharded_->check_gradients();
  // One factor, applied in fp32: in fp16, 2^16 alone would overflow.
  const double factor =
      scaler_.scale() / static_cast<double>(average ? config_.gradient_accumulation_steps : 1);
  const at::Tensor scaled = times(loss, factor);
  if (activations_) activations_->end_forward();
  const zero::MicroStep micro_step = begin_micro_step(/*callers=*/false);
  if (activations_) report_activations();
  const OwnBackward own;
  sharded_->backward(scaled, micro_step);
}

// -------------------------------------------------------------------------------- loss.backward()

at::Tensor Engine::scale(const at::Tensor& loss) {
  check_scalar("scale", loss, "");
  loss_scaled_ = true;
  return times(loss, scaler_.scale());
}

void Engine::watch_tensor(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || tensor.is_leaf()) return;
  tensor.register_hook([engine = std::weak_ptr<Engine*>(alive_)](const at::Tensor&) {
    if (const auto alive = engine.lock()) (*alive)->follow_callers_backward(/*before_gradients=*/true);
  });
}

/// Is called inside of a backward, before anything of the forward is read, and again later.
void Engine::follow_callers_backward(bool before_gradients) {
  if (!followed_.expired() || OwnBackward::runs(options_.device) || !sharded_->training()) return;
  sharded_->check_usable();
  if (before_gradients) {
    sharded_->check_gradients();
    sharded_->expect_gradients();
  }
  if (activations_) activations_->end_forward();
  if (activations_) report_activations();
  end_with_this_backward();
}

/// Has end_callers_backward() called at the end of the backward that this thread is in.
void Engine::end_with_this_backward() {
  const auto followed =
      std::make_shared<bool>(true);  // lives as long as the callback, also if that is not called
  torch::autograd::Engine::get_default_engine().queue_callback(
      [engine = std::weak_ptr<Engine*>(alive_), followed] {
        if (const auto alive = engine.lock()) (*alive)->end_callers_backward();
      });
  followed_ = followed;
}

/// A gradient has come, and no backward() runs.
void Engine::begin_callers_backward() {
  follow_callers_backward(/*before_gradients=*/false);
  if (followed_.expired() || OwnBackward::runs(options_.device)) return;
  if (window_.is_complete())
    throw Error(
        "loss.backward() after the last backward of a step: call step(), or zero_grad(); with "
        "\"managed_gradient_accumulation\": false each step() takes all gradients since the one before it");
  if (!std::exchange(loss_scaled_, false) && scaler_.scale() != 1)
    throw Error("Loss scaling is required: call engine.backward(loss), or engine.scale(loss).backward()");
  sharded_->residency().rethrow();
  zero::MicroStep micro_step = begin_micro_step(/*callers=*/true);
  micro_step.factor = 1.0 / static_cast<double>(config_.gradient_accumulation_steps);
  sharded_->begin_backward(micro_step);
}

void Engine::end_callers_backward() {
  // What has ended may be a backward inside of a node of another one, as reentrant recomputation runs it:
  // that one goes on, with gradients that are still to come. (Inside of that node a callback of its own
  // cannot be queued; where one of the next nodes begins, it can.)
  // The node of a leaf has no next one: its hook's backward ends here.
  const auto node = torch::autograd::get_current_node();
  if (node && std::ranges::any_of(node->next_edges(), [](const auto& edge) { return edge.is_valid(); })) {
    const auto followed = std::make_shared<bool>(true);
    for (const torch::autograd::Edge& edge : node->next_edges())
      if (edge.is_valid())
        edge.function->add_pre_hook(
            std::make_unique<BeforeNode>([engine = std::weak_ptr<Engine*>(alive_), followed] {
              const auto alive = engine.lock();
              if (alive && (*alive)->followed_.lock() == followed) (*alive)->end_with_this_backward();
            }));
    followed_ = followed;
    return;
  }
  followed_.reset();
  loss_scaled_ = false;
  if (sharded_->in_backward()) return sharded_->end_backward();
  if (!window_.stepped() && window_.has_gradients())
    sharded_->stand_in_for_gradients();  // autograd::grad() of an input
}

void Engine::check_managed() const {
  if (!config_.managed_gradient_accumulation)
    throw Error(
        "set_gradient_accumulation_boundary(), no_sync(): \"managed_gradient_accumulation\" is false, so "
        "each step() is the boundary");
}

void Engine::set_gradient_accumulation_boundary(std::optional<bool> is_boundary) {
  if (is_boundary) check_managed();
  window_.set_last(is_boundary);
}

void Engine::begin_no_sync() {
  check_managed();
  window_.begin_no_sync();
}

bool Engine::is_gradient_accumulation_boundary() const {
  // Between backward() and step() the micro-step just done is meant, otherwise the one to come.
  return window_.is_boundary();
}

void Engine::drop_gradients() {
  followed_.reset();
  loss_scaled_ = false;
  sharded_->drop_gradients();
  window_.give_up();
}

void Engine::step() {
  if (in_no_sync())
    throw Error(
        "step() inside of no_sync(): gradients are not reduced there; leave it for the last backward() of a "
        "step");
  sharded_->check_usable();
  if (update_is_due()) {
    check_momentum();
    sharded_->residency().refuse_held("step()");
  }
  sharded_->check_gradients();
  if (!update_is_due()) return window_.end_micro_step();
  reduce_accumulated();  // until it has updated, zero_grad() discards the step
  update();
  profiler_->end_step(global_steps_);
}

void Engine::apply_to_whole(const std::function<void()>& function) {
  if (window_.has_gradients())
    throw Error(
        "train() or eval() of the optimizer between backward() and step(): expected it after a step, or "
        "after zero_grad()");
  sharded_->apply_to_whole(function);
}

void Engine::reduce_accumulated() {
  sharded_->check_usable();
  if (window_.gradients() != AccumulationWindow::Gradients::kAccumulated) return;
  sharded_->reduce_accumulated();
  window_.complete();
}

void Engine::zero_grad() {
  if (has_failed()) return drop_gradients();
  loss_scaled_ = false;  // what was scaled may have been given up
  sharded_->free_gradients();
  if (window_.discard()) sharded_->skip_step();
}

/// Collective. At the accumulation boundary.
void Engine::update() {
  RECORD_USER_SCOPE("tessera.step");
  if (checkpoint_writer_) checkpoint_writer_->report();
  std::vector<kernels::Hyper> groups = next_groups();
  zero::WholeOptimizer* const whole = options_.whole_optimizer.get();
  const double own = whole ? whole->digest() : 0;
  // What rank 0 alone updates with may be changed by the update.
  const double of_groups = whole && whole->on_one_rank() ? 0 : digest_of(groups);
  const zero::GradientSummary summary =
      sharded_->summarize_gradients({.raise_flag = stop_requested_, .digest = own != 0 ? own : of_groups});
  should_stop_ = summary.flag_raised;
  if (!summary.is_same_step) {
    sharded_->skip_step();
    window_.give_up();
    throw Error(
        "step(): ", own != 0 ? whole->first_difference() : first_difference(*comm_, groups),
        "; expected the same on all ranks: what is set by a rank's own loss or metric has to be averaged "
        "over the ranks first. The step's gradients were dropped");
  }
  const bool overflow = summary.num_nonfinite > 0;
  gradient_norm_ = overflow ? std::numeric_limits<double>::infinity() : summary.norm / gradient_scale_;
  window_.close();
  ++global_steps_;
  if (overflow) {
    sharded_->skip_step();
    return report_skipped_step(summary);
  }
  ++schedule_steps_;
  sharded_->optimizer().groups() = std::move(groups);
  try {
    sharded_->step(clip_coefficient(gradient_norm_) / gradient_scale_);
  } catch (...) {
    if (const zero::WholeParameters* const updated = sharded_->optimizer().whole();
        updated != nullptr && updated->was_refused()) {
      --schedule_steps_;
      --global_steps_;
    }
    throw;
  }
  scaler_.update(/*overflow=*/false);
}

/// torch.nn.utils.clip_grad_norm_'s.
double Engine::clip_coefficient(double norm) const {
  if (config_.gradient_clipping <= 0) return 1;
  return std::min(1.0, config_.gradient_clipping / (norm + 1e-6));
}

void Engine::report_skipped_step(const zero::GradientSummary& summary) {
  ++skipped_steps_;
  std::string line = str("step ", global_steps_, " skipped: ", summary.num_nonfinite,
                         " gradient elements are not finite, first in ", summary.first_nonfinite);
  const double scale_before = scaler_.scale();
  try {
    scaler_.update(/*overflow=*/true);
  } catch (const Error& at_minimum) {
    throw Error(line, "; ", at_minimum.what());
  }
  if (scaler_.scale() != scale_before) line += str("; loss scale ", scale_before, " -> ", scaler_.scale());
  if (rank() == 0) options_.log.warning(line);
}

/// OneCycle's momentum rises without an end after the cycle, as DeepSpeed's.
void Engine::check_momentum() const {
  for (const std::optional<Betas>& betas : scheduled_betas())
    if (betas && betas->beta1 >= 1)
      throw ConfigError("scheduler.params.decay_mom_rate: the momentum has risen to ", betas->beta1,
                        " after ", schedule_steps_,
                        " steps; expected below 1: 0, a smaller rate, or a larger decay_step_size");
}

std::vector<kernels::Hyper> Engine::next_groups() const {
  std::vector<kernels::Hyper> groups = sharded_->optimizer().groups();
  const std::vector<double> rates = learning_rates();
  const std::vector<std::optional<Betas>> betas = scheduled_betas();
  for (size_t group = 0; group < groups.size(); ++group) {
    groups[group].lr = rates[group];
    if (!betas[group]) continue;
    groups[group].beta1 = betas[group]->beta1;
    groups[group].beta2 = betas[group]->beta2;
  }
  return groups;
}

/// Whether the engine's own formulas update, by the groups; else the caller's optimizer does as it likes.
bool Engine::steps_by_groups() const {
  return !options_.whole_optimizer || kernels::updates_whole_parameters(optimizer_.kind);
}

void Engine::set_hyper(size_t group, const kernels::Hyper& hyper) {
  zero::ShardedOptimizer& optimizer = sharded_->optimizer();
  if (group >= optimizer.groups().size())
    throw Error("param group ", group, "; expected 0 to ", optimizer.groups().size() - 1);
  visit_options(hyper, []<class T>(const char* name, const T& value) {
    if constexpr (std::is_same_v<T, double>)
      if (!std::isfinite(value)) throw Error(name, " is ", value, "; expected a finite number");
  });
  kernels::Hyper& now = optimizer.groups()[group];
  if (hyper.centered != now.centered)
    throw Error("centered was changed after initialize(), which decides about a state; expected no change");
  const std::vector<std::string>& kept = optimizer.state_names();
  for (const std::string_view state : kernels::state_names(optimizer.kind(), hyper))
    if (std::ranges::find(kept, state) == kept.end())
      throw Error(state == "momentum_buffer" ? str("momentum ", hyper.momentum) : "amsgrad",
                  ", which no param group had at initialize(), so that there is no memory for it; expected "
                  "it in some group there");
  if (optimizer.kind() == kernels::OptimizerKind::kSGD && hyper.momentum != 0 && now.momentum == 0 &&
      hyper.dampening != 0 && global_steps_ > 0)
    throw Error("momentum ", hyper.momentum, " and dampening ", hyper.dampening,
                " after steps without momentum; expected dampening 0");
  if (hyper.use_muon != now.use_muon)
    throw Error(
        "use_muon was changed after initialize(), and states of matrices mean something else with it than "
        "without; expected no change");
  if (!(hyper.adam_lr_ratio >= 0))
    throw Error("adam_lr_ratio is ", hyper.adam_lr_ratio, "; expected a number of at least 0");
  now = hyper;
}

void Engine::set_schedule_steps(int64_t steps) {
  if (steps < 0) throw Error("set_schedule_steps(): found ", steps, "; expected at least 0");
  schedule_steps_ = steps;
}

void Engine::set_learning_rates(std::vector<double> rates) {
  if (rates.size() != schedule_.num_groups())
    throw Error("set_learning_rates(): ", rates.size(), " rates for ", schedule_.num_groups(),
                " param groups");
  for (const double rate : rates)
    if (!std::isfinite(rate)) throw Error("set_learning_rates(): found ", rate, "; expected finite numbers");
  set_rates_ = std::move(rates);
}

std::vector<double> Engine::learning_rates() const {
  if (set_rates_) return *set_rates_;
  std::vector<double> rates;
  if (options_.whole_optimizer && std::holds_alternative<ConstantLrOptions>(config_.scheduler))
    rates = options_.whole_optimizer->rates();
  if (!rates.empty()) return rates;
  for (size_t group = 0; group < schedule_.num_groups(); ++group)
    rates.push_back(schedule_.lr(schedule_steps_, group));
  return rates;
}

std::vector<std::optional<Betas>> Engine::scheduled_betas() const {
  std::vector<std::optional<Betas>> betas(schedule_.num_groups());
  if (!has_betas()) return betas;
  for (size_t group = 0; group < betas.size(); ++group)
    betas[group] = schedule_.betas(schedule_steps_, group);
  return betas;
}

/// Collective. What one rank alone must refuse is an error of all: the others would wait for it.
void Engine::check_usable_on_all_ranks(std::string_view call) const {
  comm::on_all_ranks<Error>(*comm_, str("engine before ", call).c_str(), [&] { sharded_->check_usable(); });
}

at::Tensor Engine::full_gradient(const std::string& name) {
  check_usable_on_all_ranks("full_gradient()");
  if (window_.gradients() == AccumulationWindow::Gradients::kDiscarded)
    throw Error(
        "full_gradient(\"", name,
        "\"): there is none, because zero_grad(), drop_gradients(), load_checkpoint(), load_weights() or a "
        "step() that was refused has discarded the gradients; expected a backward() before it");
  if (micro_steps_ == 0)
    throw Error("full_gradient(\"", name, "\"): no backward() was called, and there is none yet");
  const at::NoGradGuard no_grad;
  at::Tensor gradient = sharded_->full_gradient(name);
  return gradient_scale_ == 1 ? gradient : gradient.div_(gradient_scale_);
}

/// Collective. Rank 0's value on all ranks, on the device in fp32.
at::Tensor Engine::value_to_set(std::string_view call, const std::string& name, const at::Tensor& value) {
  comm::on_all_ranks<Error>(*comm_, str("engine before ", call, "()").c_str(), [&] {
    sharded_->check_usable();
    const int parameter = sharded_->layout().find(name);
    if (parameter < 0) throw Error("the model has no parameter named ", name);
    const std::vector<int64_t>& shape = sharded_->layout().parameters()[parameter].shape;
    if (value.defined() && value.sizes() == at::IntArrayRef(shape) && value.is_floating_point()) return;
    throw Error(
        call, "(\"", name, "\"): expected a floating tensor of shape ", describe_shape(shape), ", found ",
        value.defined()
            ? str("one of ", c10::toString(value.scalar_type()), ", shape ", describe_shape(value.sizes()))
            : std::string("an undefined one"));
  });
  const at::NoGradGuard no_grad;
  const at::Tensor all =
      value.detach().to(options_.device, at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  if (comm_->size() > 1) comm_->broadcast(all.view(-1), 0, str("value of ", name))->wait();
  return all;
}

void Engine::set_full_parameter(const std::string& name, const at::Tensor& value) {
  sharded_->set_full_parameter(name, value_to_set("set_full_parameter", name, value));
}

void Engine::set_full_gradient(const std::string& name, const at::Tensor& value) {
  if (!window_.is_complete())
    throw Error("set_full_gradient(\"", name,
                "\"): expected between the backward() at the accumulation boundary and step()");
  at::Tensor gradient = value_to_set("set_full_gradient", name, value);
  sharded_->set_full_gradient(name, gradient_scale_ == 1 ? gradient : gradient.mul_(gradient_scale_));
}

// ------------------------------------------------------------------------------- modes and forward

void Engine::train() {
  sharded_->check_usable();
  set_training(true);
  sharded_->train();
  if (activations_) activations_->set_training(true);
}

void Engine::eval() {
  check_usable_on_all_ranks("eval()");
  set_training(false);
  sharded_->eval();
  if (activations_) activations_->set_training(false);
}

Engine::ForwardScope::ForwardScope(Engine& engine)
    : engine_(engine),
      autocast_(engine.config_.autocast, engine.options_.device),
      named_(at::RecordScope::USER_SCOPE) {
  if (named_.isActive()) named_.before("tessera.forward");
  engine_.sharded_->check_usable();
  // A new micro-step begins, whether or not step() was called after the last.
  if (engine_.sharded_->training()) engine_.window_.begin_forward();
  if (engine_.activations_ && engine_.sharded_->training()) engine_.activations_->begin_forward();
  engine_.sharded_->begin_forward();
}

void Engine::ForwardScope::finish() { engine_.sharded_->end_forward(); }

at::Tensor Engine::prepare_tensor(const at::Tensor& input) const {
  return input.to(options_.device, input.is_floating_point() ? input_dtype_.value_or(input.scalar_type())
                                                             : input.scalar_type());
}

std::unique_ptr<TypedEngine<torch::jit::Module>> initialize(const torch::jit::Module& model,
                                                            const EngineConfig& config,
                                                            comm::CommunicatorPtr comm,
                                                            const InitOptions& options) {
  // A jit::Module is a handle: the copy is the same module.
  return initialize(std::make_shared<torch::jit::Module>(model), config, std::move(comm), options);
}

}  // namespace tessera
