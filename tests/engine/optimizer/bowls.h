// A Bowl trained by an engine, and by an optimizer of torch::optim in plain libtorch.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <utility>

#include "tests/support/losses.h"

namespace tessera::testing {

/// Two units hold two parameters, and shards cut through all.
inline EngineConfig bowl_config(int stage, OptimizerOptions options = AdamWOptions{}) {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.zero = {.stage = stage, .unit_numel = 200, .param_persistence_threshold = 0};
  config.optimizer.options = std::move(options);
  return config;
}

template <class Engine>
void train_bowl(Engine& engine, int64_t steps = 20) {
  for (int64_t micro = 0; micro < steps * engine.config().gradient_accumulation_steps; ++micro) {
    engine.backward(engine.forward());
    engine.step();
  }
}

inline std::unique_ptr<TypedEngine<BowlImpl>> bowl_engine(const EngineConfig& config,
                                                          comm::CommunicatorPtr comm,
                                                          const InitOptions& options = {}) {
  Bowl model;
  fill_parameters(*model, 1);
  return initialize(model, config, std::move(comm), options);
}

/// The weights after `steps` steps of `world` ranks.
inline Tensors bowl_weights(int world, const EngineConfig& config, const InitOptions& options = {},
                            int64_t steps = 20) {
  Tensors weights;
  on_ranks(world, [&](comm::CommunicatorPtr comm) {
    const auto engine = bowl_engine(config, comm, options);
    train_bowl(*engine, steps);
    Tensors mine = full_parameters(*engine);
    if (comm->rank() == 0) weights = std::move(mine);
  });
  return weights;
}

/// `step(model, number)` after each backward, from 0. Returns the weights.
inline Tensors plain_bowl(BowlImpl& model, int steps, const std::function<void(int)>& step) {
  for (int number = 0; number < steps; ++number) {
    model.zero_grad();
    model.forward().backward();
    step(number);
  }
  Tensors weights;
  for (const auto& item : model.named_parameters()) weights[item.key()] = item.value().detach().clone();
  return weights;
}

/// By the optimizer that `make(BowlImpl&)` returns a pointer to. `after(optimizer, step)`: after each step.
template <class Make>
Tensors plain_bowl(const Make& make, int steps = 20,
                   const std::function<void(torch::optim::Optimizer&, int)>& after = {}) {
  Bowl model;
  fill_parameters(*model, 1);
  const auto optimizer = make(*model);
  return plain_bowl(*model, steps, [&](int step) {
    optimizer->step();
    if (after) after(*optimizer, step);
  });
}

}  // namespace tessera::testing
