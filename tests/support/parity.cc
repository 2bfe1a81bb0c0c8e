#include "tests/support/parity.h"

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace tessera::testing {

EngineConfig engine_config(const Case& c) {
  EngineConfig config = c.config;
  config.train_micro_batch_size_per_gpu = c.micro_batch;
  config.gradient_accumulation_steps = c.accumulation;
  config.train_batch_size = static_cast<int64_t>(c.micro_batch) * c.accumulation * c.world;
  config.gradient_clipping = c.clipping;
  if (c.optimizer == "SGD") {
    config.optimizer.options = SGDOptions{.lr = 0.1, .weight_decay = 0.01, .momentum = 0.9};
  } else if (c.optimizer == "AMSGrad") {
    config.optimizer.options = AdamWOptions{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true};
  } else if (c.optimizer == "centered RMSprop") {
    config.optimizer.options = RMSpropOptions{.lr = 0.001, .eps = 1e-3, .momentum = 0.9, .centered = true};
  } else {
    config.optimizer.options = options_named<OptimizerOptions>(c.optimizer).value();
    std::visit([](auto& options) { options.lr = 0.01, options.weight_decay = 0.1; },
               config.optimizer.options);
  }
  return config;
}

double largest_difference(const Tensors& a, const Tensors& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (const auto& [name, tensor] : a) {
    if (!b.count(name) || b.at(name).sizes() != tensor.sizes()) return INFINITY;
    if (tensor.numel() > 0) largest = std::max(largest, (tensor - b.at(name)).abs().max().item<double>());
  }
  return largest;
}

bool bit_equal(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, tensor] : a)
    if (!b.count(name) || !at::equal(tensor, b.at(name))) return false;
  return true;
}

std::unique_ptr<torch::optim::Optimizer> plain_optimizer(const Case& c,
                                                         const std::vector<at::Tensor>& parameters) {
  if (c.optimizer == "SGD")
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  return std::make_unique<torch::optim::AdamW>(parameters,
                                               torch::optim::AdamWOptions(0.01).weight_decay(0.1));
}

TrainingRun plain_run(const Case& c, torch::nn::Module& model, const BatchLoss& loss_of) {
  std::vector<at::Tensor> trainable;
  for (const auto& parameter : model.parameters())
    if (parameter.requires_grad() && std::none_of(trainable.begin(), trainable.end(),
                                                  [&](const at::Tensor& t) { return t.is_same(parameter); }))
      trainable.push_back(parameter);
  const auto optimizer = plain_optimizer(c, trainable);
  TrainingRun run;
  for (int step = 0; step < c.steps; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int micro = 0; micro < c.accumulation; ++micro) {
      const at::Tensor loss =
          loss_of(step, first_sample(c, micro, 0), static_cast<int64_t>(c.world) * c.micro_batch);
      (loss / c.accumulation).backward();
      sum += loss.item<double>() / c.accumulation;
    }
    run.losses.push_back(sum);
    Tensors gradients;
    for (const auto& item : model.named_parameters())
      if (item.value().requires_grad())
        gradients[item.key()] =
            item.value().grad().defined() ? item.value().grad().clone() : at::zeros_like(item.value());
    run.gradients.push_back(std::move(gradients));
    run.norms.push_back(torch::nn::utils::clip_grad_norm_(trainable, c.clipping > 0 ? c.clipping : 1e30));
    optimizer->step();
  }
  for (const auto& item : model.named_parameters()) run.weights[item.key()] = item.value().detach().clone();
  return run;
}

std::vector<at::Tensor> fp32_masters(const torch::nn::Module& model) {
  std::vector<at::Tensor> masters;
  for (const at::Tensor& parameter : model.parameters())
    if (parameter.requires_grad())
      masters.push_back(parameter.detach().to(at::kFloat, false, /*copy=*/true).set_requires_grad(true));
  return masters;
}

TrainingRun plain_master_run(const Case& c, torch::nn::Module& model, const std::vector<at::Tensor>& masters,
                             const BatchLoss& loss_of, double scale) {
  std::vector<at::Tensor> trainable;
  TrainingRun run;
  for (const auto& item : model.named_parameters()) {
    run.weights[item.key()] =
        item.value().requires_grad() ? masters.at(trainable.size()).detach() : item.value().to(at::kFloat);
    if (item.value().requires_grad()) trainable.push_back(item.value());
  }
  const auto optimizer = plain_optimizer(c, masters);
  for (int step = 0; step < c.steps; ++step) {
    for (const at::Tensor& master : masters) master.mutable_grad() = at::zeros_like(master);
    double sum = 0;
    for (int micro = 0; micro < c.accumulation; ++micro)
      for (int rank = 0; rank < c.world; ++rank) {
        const at::Tensor loss = loss_of(step, first_sample(c, micro, rank), c.micro_batch);
        sum += loss.item<double>() / c.accumulation / c.world;
        model.zero_grad();
        (loss.to(at::kFloat) * (scale / c.accumulation)).backward();
        for (size_t i = 0; i < masters.size(); ++i)
          masters[i].mutable_grad().add_(trainable[i].grad().to(at::kFloat), 1 / (scale * c.world));
      }
    run.losses.push_back(sum);
    optimizer->step();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < masters.size(); ++i) trainable[i].copy_(masters[i]);
  }
  return run;
}

Tensors full_parameters(Engine& engine) {
  Tensors all;
  for (const auto& spec : engine.sharded_model().layout().parameters())
    all[spec.name] = engine.full_parameter(spec.name);
  return all;
}

TrainingRun rank_run(const Case& c, Engine& engine, const BatchLoss& loss_of, const Inspect& inspect) {
  TrainingRun run;
  for (int step = 0; step < c.steps; ++step) {
    at::Tensor sum = at::zeros({1}, at::TensorOptions(engine.comm().device()).dtype(at::kDouble));
    for (int micro = 0; micro < c.accumulation; ++micro) {
      const at::Tensor loss = loss_of(step, first_sample(c, micro, engine.comm().rank()), c.micro_batch);
      sum += loss.detach().to(at::kDouble) / c.accumulation / c.world;
      engine.backward(loss);
      if (micro == c.accumulation - 1) {
        Tensors gradients;
        for (const auto& spec : engine.sharded_model().layout().parameters()) {
          if (!spec.trainable) continue;
          gradients[spec.name] = engine.full_gradient(spec.name);
          for (const std::string& alias : spec.aliases) gradients[alias] = gradients[spec.name];
        }
        run.gradients.push_back(std::move(gradients));
      }
      engine.step();
    }
    engine.comm().all_reduce(sum, "test loss")->wait();
    run.losses.push_back(sum.item<double>());
    run.norms.push_back(engine.gradient_norm());
    if (inspect) inspect(engine, step);
  }
  run.weights = full_parameters(engine);
  for (const auto& spec : engine.sharded_model().layout().parameters())
    for (const std::string& alias : spec.aliases) run.weights[alias] = run.weights[spec.name];
  return run;
}

}  // namespace tessera::testing
