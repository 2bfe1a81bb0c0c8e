// A training program of one's own: a module, data in memory, a DeepSpeed configuration, and, as `app CONFIG
// RMSprop`, an optimizer of one's own.
#include <tessera/tessera.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <iomanip>
#include <iostream>
#include <memory>
#include <string>

#include "rmsprop.h"

struct ClassifierImpl : torch::nn::Module {
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(8, 64))};
  torch::nn::LayerNorm norm{register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(64, 4))};
  at::Tensor forward(at::Tensor x) { return out(at::gelu(norm(hidden(x)))); }  // (B, 8) -> (B, 4)
};
TORCH_MODULE(Classifier);

int main(int argc, char** argv) try {
  const auto comm = tessera::comm::join();
  const auto config = tessera::load_engine_config(argc > 1 ? argv[1] : "", {.world_size = comm->size()});
  at::manual_seed(1);
  const at::Tensor points = at::randn({512, 8}), labels = points.narrow(1, 0, 4).argmax(1);

  Classifier model;
  tessera::InitOptions options;
  if (argc > 2 && argv[2] == std::string("RMSprop")) options.update_rule = std::make_shared<RMSprop>();
  const auto engine = tessera::initialize(model, config, comm, options);
  const int64_t batch = config.train_micro_batch_size_per_gpu;
  for (int64_t step = 0; step < 60; ++step) {
    const int64_t begin = (step * comm->size() + comm->rank()) * batch % 512;  // each rank takes its part
    const at::Tensor logits = engine->forward(points.narrow(0, begin, batch));
    const at::Tensor loss = at::cross_entropy_loss(logits, labels.narrow(0, begin, batch));
    engine->backward(loss);
    engine->step();
  }
  engine->save_checkpoint("checkpoints");
  engine->eval();
  const at::Tensor correct = engine->forward(points).argmax(1).eq(labels).to(at::kDouble).mean();
  const double weight = engine->full_parameter("out.weight").sum().item<double>();  // every rank takes part
  if (engine->rank() == 0)
    std::cout << "stage " << config.zero.stage << ", " << comm->size() << " ranks, accuracy "
              << std::setprecision(17) << correct.item<double>() << ", weight " << weight << '\n';
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
