// Training with the engine on some ranks, and the same training in a plain libtorch loop on the global batch.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/init/init.h"
#include "engine/config/config.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "tests/support/backend.h"
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
  std::string backend = default_backend();
  std::string optimizer = "SGD";  // or "AdamW"; plain_run() has only these
  EngineConfig config;            // zero.*, precision; the rest is filled in
};

EngineConfig engine_config(const Case& c);

/// `loss(model, step, first_sample, num_samples)`: the mean loss over samples [first, first + num) of a
/// step's global batch of world x accumulation x micro_batch samples.
template <class Model>
using LossOf = std::function<at::Tensor(Model&, int step, int64_t first, int64_t num)>;
using BatchLoss = std::function<at::Tensor(int step, int64_t first, int64_t num)>;

/// Sample order of the global batch: micro-step, then rank.
inline int64_t first_sample(const Case& c, int micro_step, int rank) {
  return (static_cast<int64_t>(micro_step) * c.world + rank) * c.micro_batch;
}

/// libtorch's optimizer for c.optimizer, with the hyperparameters of engine_config().
std::unique_ptr<torch::optim::Optimizer> plain_optimizer(const Case& c,
                                                         const std::vector<at::Tensor>& parameters);

/// The plain loop: one process, the whole batch of each micro-step at once.
TrainingRun plain_run(const Case& c, torch::nn::Module& model, const BatchLoss& loss_of);
template <class Holder>
TrainingRun plain_run(const Case& c, const LossOf<typename Holder::Impl>& loss_of) {
  Holder model;
  fill_parameters(*model, 1);
  return plain_run(c, *model,
                   [&](int step, int64_t first, int64_t num) { return loss_of(*model, step, first, num); });
}

/// fp32 copies of the trainable parameters, in the model's order.
std::vector<at::Tensor> fp32_masters(const torch::nn::Module& model);

/// The plain loop with fp32 masters of the trainable parameters, which the optimizer updates. Ranks are
/// played one after the other. `scale`: of the loss. The run's weights are the masters; frozen ones in fp32.
TrainingRun plain_master_run(const Case& c, torch::nn::Module& model, const std::vector<at::Tensor>& masters,
                             const BatchLoss& loss_of, double scale = 1);

/// Every parameter whole, by name, on every rank. Collective.
Tensors full_parameters(Engine& engine);

/// What one rank does. `inspect` is called after each optimizer step, on every rank.
using Inspect = std::function<void(Engine&, int step)>;
TrainingRun rank_run(const Case& c, Engine& engine, const BatchLoss& loss_of, const Inspect& inspect);
template <class Holder>
TrainingRun rank_run(const Case& c, comm::CommunicatorPtr comm, const LossOf<typename Holder::Impl>& loss_of,
                     const Inspect& inspect = {}) {
  Holder model;
  fill_parameters(*model, 1 + 1000 * comm->rank());  // all ranks must get rank 0's
  auto engine = initialize(model, engine_config(c), comm);
  return rank_run(
      c, *engine, [&](int step, int64_t first, int64_t num) { return loss_of(*model, step, first, num); },
      inspect);
}

template <class Holder>
TrainingRun engine_run(const Case& c, const LossOf<typename Holder::Impl>& loss_of,
                       const Inspect& inspect = {}) {
  TrainingRun run;
  comm::run_threads(c.world, {.backend = c.backend, .timeout = std::chrono::seconds(60)},
                    [&](comm::CommunicatorPtr comm) {
                      at::set_num_threads(1);
                      TrainingRun mine = rank_run<Holder>(c, comm, loss_of, inspect);
                      if (comm->rank() == 0) run = std::move(mine);
                    });
  return run;
}

double largest_difference(const Tensors& a, const Tensors& b);

bool bit_equal(const Tensors& a, const Tensors& b);

}  // namespace tessera::testing
