// Training a model with the engine on some ranks, and the same in a plain libtorch loop on the global batch.
#pragma once

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/init.h"
#include "engine/config/config.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "tests/support/models.h"

namespace tessera::testing {

using Tensors = std::map<std::string, at::Tensor>;

/// One training run, seen from rank 0.
struct TrainingRun {
  std::vector<double> losses;      // of the global batch, by optimizer step
  std::vector<Tensors> gradients;  // before clipping, by optimizer step
  std::vector<double> norms;
  Tensors weights;  // at the end
};

struct Case {
  int world = 1;
  int accumulation = 1;
  int micro_batch = 2;
  int steps = 4;
  double clipping = 0;
  std::string backend = "gloo";
  std::string optimizer = "SGD";  // or "AdamW" (plain_run() knows no other)
  EngineConfig config;            // zero.*, precision; the rest is filled in
};

inline EngineConfig engine_config(const Case& c) {
  EngineConfig config = c.config;
  config.train_micro_batch_size_per_gpu = c.micro_batch;
  config.gradient_accumulation_steps = c.accumulation;
  config.train_batch_size = static_cast<int64_t>(c.micro_batch) * c.accumulation * c.world;
  config.gradient_clipping = c.clipping;
  config.optimizer.type = c.optimizer;
  if (c.optimizer == "SGD") {
    config.optimizer.params = {{"lr", 0.1}, {"momentum", 0.9}, {"weight_decay", 0.01}};
  } else {
    config.optimizer.params = {{"lr", 0.01}, {"weight_decay", 0.1}};
  }
  return config;
}

/// `loss(model, step, first_sample, num_samples)`: the mean loss over samples [first, first + num) of a step's
/// global batch of world x accumulation x micro_batch samples.
template <class Model>
using LossOf = std::function<at::Tensor(Model&, int step, int64_t first, int64_t num)>;

/// Sample order of the global batch: micro-step, then rank.
inline int64_t first_sample(const Case& c, int micro_step, int rank) {
  return (static_cast<int64_t>(micro_step) * c.world + rank) * c.micro_batch;
}

/// The plain loop: one process, the whole batch of each micro-step at once.
template <class Holder>
TrainingRun plain_run(const Case& c, const LossOf<typename Holder::Impl>& loss_of) {
  Holder model;
  fill_parameters(*model, 1);
  std::vector<at::Tensor> trainable;
  for (const auto& parameter : model->parameters())
    if (parameter.requires_grad() &&
        std::none_of(trainable.begin(), trainable.end(), [&](const at::Tensor& t) { return t.is_same(parameter); }))
      trainable.push_back(parameter);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (c.optimizer == "SGD") {
    optimizer = std::make_unique<torch::optim::SGD>(trainable, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  } else {
    optimizer = std::make_unique<torch::optim::AdamW>(trainable, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  }
  TrainingRun run;
  for (int step = 0; step < c.steps; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int micro = 0; micro < c.accumulation; ++micro) {
      const at::Tensor loss = loss_of(*model, step, first_sample(c, micro, 0), static_cast<int64_t>(c.world) * c.micro_batch);
      (loss / c.accumulation).backward();
      sum += loss.item<double>() / c.accumulation;
    }
    run.losses.push_back(sum);
    Tensors gradients;
    for (const auto& item : model->named_parameters())
      if (item.value().requires_grad())
        gradients[item.key()] = item.value().grad().defined() ? item.value().grad().clone() : at::zeros_like(item.value());
    run.gradients.push_back(std::move(gradients));
    run.norms.push_back(torch::nn::utils::clip_grad_norm_(trainable, c.clipping > 0 ? c.clipping : 1e30));
    optimizer->step();
  }
  for (const auto& item : model->named_parameters()) run.weights[item.key()] = item.value().detach().clone();
  return run;
}

/// What one rank does. `inspect` is called after each optimizer step, on every rank.
template <class Holder>
TrainingRun rank_run(const Case& c, comm::CommunicatorPtr comm, const LossOf<typename Holder::Impl>& loss_of,
             const std::function<void(Engine&, int step)>& inspect = {}) {
  Holder model;
  fill_parameters(*model, 1 + 1000 * comm->rank());  // rank 0's must win
  auto engine = initialize(model, engine_config(c), comm);
  TrainingRun run;
  for (int step = 0; step < c.steps; ++step) {
    at::Tensor sum = at::zeros({1}, at::kDouble);
    for (int micro = 0; micro < c.accumulation; ++micro) {
      const at::Tensor loss = loss_of(*model, step, first_sample(c, micro, comm->rank()), c.micro_batch);
      sum += loss.detach().to(at::kDouble) / c.accumulation / c.world;
      engine->backward(loss);
      if (micro == c.accumulation - 1) {
        Tensors gradients;
        for (const auto& spec : engine->sharded_model().layout().parameters()) {
          if (!spec.trainable) continue;
          gradients[spec.name] = engine->full_gradient(spec.name);
          for (const std::string& alias : spec.aliases) gradients[alias] = gradients[spec.name];
        }
        run.gradients.push_back(std::move(gradients));
      }
      engine->step();
    }
    comm->all_reduce(sum, "test loss")->wait();
    run.losses.push_back(sum.item<double>());
    run.norms.push_back(engine->gradient_norm());
    if (inspect) inspect(*engine, step);
  }
  for (const auto& spec : engine->sharded_model().layout().parameters()) {
    run.weights[spec.name] = engine->full_parameter(spec.name);
    for (const std::string& alias : spec.aliases) run.weights[alias] = run.weights[spec.name];
  }
  return run;
}

template <class Holder>
TrainingRun engine_run(const Case& c, const LossOf<typename Holder::Impl>& loss_of,
               const std::function<void(Engine&, int step)>& inspect = {}) {
  TrainingRun run;
  comm::run_threads(c.world, {.backend = c.backend, .timeout = std::chrono::seconds(60)}, [&](comm::CommunicatorPtr comm) {
    at::set_num_threads(1);
    TrainingRun mine = rank_run<Holder>(c, comm, loss_of, inspect);
    if (comm->rank() == 0) run = std::move(mine);
  });
  return run;
}

inline double largest_difference(const Tensors& a, const Tensors& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (const auto& [name, tensor] : a) {
    if (!b.count(name) || b.at(name).sizes() != tensor.sizes()) return INFINITY;
    if (tensor.numel() > 0) largest = std::max(largest, (tensor - b.at(name)).abs().max().item<double>());
  }
  return largest;
}

inline bool bit_equal(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, tensor] : a)
    if (!b.count(name) || !at::equal(tensor, b.at(name))) return false;
  return true;
}

}  // namespace tessera::testing
