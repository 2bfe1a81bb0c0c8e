#include "engine/engine.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/str.h"
#include "engine/optimizer_setup.h"
#include "zero/torch_dtype.h"

namespace tessera {
namespace {

std::vector<double> rates_of(const std::vector<kernels::Hyper>& groups) {
  std::vector<double> rates;
  for (const kernels::Hyper& group : groups) rates.push_back(group.lr);
  return rates;
}

void check_batch(const EngineConfig& config, int world_size) {
  const int64_t product = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * world_size;
  if (config.train_batch_size != product || product <= 0)
    throw ConfigError(str("train_batch_size ", config.train_batch_size, " is not micro batch ",
                          config.train_micro_batch_size_per_gpu, " x accumulation ", config.gradient_accumulation_steps,
                          " x world ", world_size, " = ", product, ": was the config read for another world size?"));
}

zero::ShardedModelOptions sharding_options(const EngineConfig& config, const InitOptions& init, const OptimizerSetup& optimizer) {
  const ZeroConfig& zero = config.zero;
  const DType accumulate = config.grad_accum_dtype.value_or(DType::kFloat32);
  zero::ShardedModelOptions options;
  options.sharding = zero::sharding_of(zero.stage);
  options.compute_dtype = config.compute_dtype();
  options.device = init.device;
  options.unit_numel = std::min({zero.unit_numel, zero.reduce_bucket_size, zero.allgather_bucket_size});
  options.track_casts = config.autocast.enabled;
  options.reducer.accumulate_dtype = zero::to_torch(accumulate);
  options.reducer.communicate_dtype = zero::to_torch(config.communication_dtype.value_or(accumulate));
  options.reducer.reduce_each_micro_step = zero.reduce_each_micro_step;
  options.reducer.overlap = zero.overlap_comm;
  options.reducer.num_slots = zero.communication_buffers;
  options.reducer.predivide_factor = config.gradient_predivide_factor;
  options.reducer.prescale = config.prescale_gradients;
  options.residency.overlap = zero.overlap_comm;
  options.residency.capacity_units = zero.communication_buffers;
  options.residency.max_live_numel = zero.max_live_parameters;
  options.residency.prefetch_numel = zero.prefetch_bucket_size;
  options.residency.persistence_numel = zero.param_persistence_threshold;
  options.residency.log = init.log;
  options.optimizer = optimizer.kind;
  options.groups = optimizer.groups;
  options.group_of = optimizer.group_of;
  return options;
}

}  // namespace

Engine::Engine(const zero::ModelView& model, const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options)
    : config_(config),
      comm_(std::move(comm)),
      options_(options),
      scaler_(config.fp16),
      base_groups_(set_up_optimizer(config.optimizer).groups),
      schedule_(config.scheduler, rates_of(base_groups_), options.steps_per_epoch) {
  check_batch(config_, comm_->size());
  sharded_ = std::make_unique<zero::ShardedModel>(model, comm_,
                                                  sharding_options(config_, options_, set_up_optimizer(config_.optimizer)));
  sharded_->begin_pass(zero::Pass::kTrain);
}

Engine::~Engine() = default;

// ----------------------------------------------------------------------------------------- the step

void Engine::backward(const at::Tensor& loss) {
  sharded_->residency().rethrow();
  if (!loss.defined() || loss.numel() != 1)
    throw Error(str("backward() needs a scalar loss, found ",
                    loss.defined() ? str("a tensor of ", loss.numel(), " elements") : std::string("an undefined tensor"),
                    ": reduce it first, e.g. with mean()"));
  if (!training_) throw Error("backward() in evaluation mode: call train() first");
  if (at_boundary()) throw Error("backward() at the accumulation boundary: call step() after the last backward()");
  at::Tensor scaled = loss;
  if (config_.gradient_accumulation_steps > 1) scaled = scaled / config_.gradient_accumulation_steps;
  gradient_scale_ = scaler_.scale();
  if (gradient_scale_ != 1) scaled = scaled.to(at::kFloat) * gradient_scale_;

  const bool first = micro_steps_in_window_ == 0;
  ++micro_steps_;
  ++micro_steps_in_window_;
  stepped_ = false;
  zero::GradientReducer& gradients = sharded_->gradients();
  gradients.begin_backward(first, at_boundary());
  torch::autograd::backward({scaled}, {});
  sharded_->residency().rethrow();
  gradients.finish_backward();
  sharded_->end_pass();
  if (!at_boundary()) sharded_->begin_pass(zero::Pass::kTrain);
}

bool Engine::is_gradient_accumulation_boundary() const {
  // Between backward() and step() the micro-step just done is meant, otherwise the one to come.
  return micro_steps_in_window_ + (stepped_ ? 1 : 0) == config_.gradient_accumulation_steps;
}

void Engine::step() {
  sharded_->residency().rethrow();
  stepped_ = true;
  if (!at_boundary()) return;
  zero::GradientReducer& gradients = sharded_->gradients();
  zero::GradientSummary summary = sharded_->optimizer().summarize(gradients);
  if (!summary.late_units.empty()) {
    gradients.reduce_late(summary.late_units);
    summary = sharded_->optimizer().summarize(gradients);
  }
  gradient_norm_ = summary.num_nonfinite > 0 ? std::numeric_limits<double>::infinity() : summary.norm / gradient_scale_;
  micro_steps_in_window_ = 0;
  ++global_steps_;
  if (summary.num_nonfinite > 0) {
    skip_step(summary);
  } else {
    set_rates();
    sharded_->update(clip_coefficient(gradient_norm_) / gradient_scale_, summary.used);
    scaler_.update(/*overflow=*/false);
  }
  sharded_->begin_pass(zero::Pass::kTrain);
}

/// torch.nn.utils.clip_grad_norm_'s.
double Engine::clip_coefficient(double norm) const {
  if (config_.gradient_clipping <= 0) return 1;
  return std::min(1.0, config_.gradient_clipping / (norm + 1e-6));
}

void Engine::skip_step(const zero::GradientSummary& summary) {
  ++skipped_steps_;
  const double scale_before = scaler_.scale();
  scaler_.update(/*overflow=*/true);
  std::string line = str("step ", global_steps_, " skipped: ", summary.num_nonfinite,
                         " gradient elements are not finite, first in ", summary.first_nonfinite);
  if (scaler_.scale() != scale_before) line += str("; loss scale ", scale_before, " -> ", scaler_.scale());
  if (rank() == 0) options_.log.warning(line);
}

void Engine::set_rates() {
  const int64_t applied = global_steps_ - 1 - skipped_steps_;
  std::vector<kernels::Hyper>& groups = sharded_->optimizer().groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    groups[group].lr = schedule_.lr(applied, group);
    if (const auto betas = schedule_.betas(applied, group)) {
      groups[group].beta1 = betas->beta1;
      groups[group].beta2 = betas->beta2;
    }
  }
}

std::vector<double> Engine::learning_rates() const {
  std::vector<double> rates;
  for (size_t group = 0; group < base_groups_.size(); ++group)
    rates.push_back(schedule_.lr(global_steps_ - skipped_steps_, group));
  return rates;
}

at::Tensor Engine::full_gradient(const std::string& name) {
  const at::NoGradGuard no_grad;
  at::Tensor gradient = sharded_->full_gradient(name);
  return gradient_scale_ == 1 ? gradient : gradient.div_(gradient_scale_);
}

// ------------------------------------------------------------------------------- modes and forward

void Engine::train() {
  set_training(true);
  if (training_) return;
  training_ = true;
  sharded_->begin_pass(zero::Pass::kTrain);
}

void Engine::eval() {
  set_training(false);
  sharded_->broadcast_buffers();
  if (training_) sharded_->drop_pass();
  training_ = false;
}

Engine::ForwardScope::ForwardScope(Engine& engine) : engine_(engine), autocast_(engine.config_.autocast, engine.options_.device) {
  engine_.sharded_->residency().rethrow();
  if (engine_.training_) {
    engine_.stepped_ = true;  // a new micro-step begins, whether or not step() was called after the last
  } else {
    engine_.sharded_->begin_pass(zero::Pass::kEvaluation);
  }
}

void Engine::ForwardScope::finish() {
  engine_.sharded_->residency().rethrow();
  if (!engine_.training_) engine_.sharded_->end_pass();
}

at::Tensor Engine::prepare(const at::Tensor& input) const {
  if (!input.defined()) return input;
  const DType compute = config_.compute_dtype();
  const bool cast = input.is_floating_point() && compute != DType::kFloat32;
  return input.to(options_.device, cast ? zero::to_torch(compute) : input.scalar_type());
}

std::vector<c10::IValue> Engine::prepare(std::vector<c10::IValue> inputs) const {
  for (c10::IValue& input : inputs)
    if (input.isTensor()) input = prepare(input.toTensor());
  return inputs;
}

}  // namespace tessera
