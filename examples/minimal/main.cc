// The smallest program on Tessera: a module of your own, a DeepSpeed config, a
// loop. README.md shows main().
#include <tessera/tessera.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

struct NetImpl : torch::nn::Module {  // any torch::nn::Module, as it is
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(16, 64))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(64, 1))};
  at::Tensor forward(at::Tensor x, at::Tensor y) { return at::mse_loss(fc2(at::relu(fc1(x))), y); }
};
TORCH_MODULE(Net);

int main(int argc, char** argv) try {
  auto comm = tessera::comm::join();  // RANK, WORLD_SIZE, MASTER_ADDR …
  auto config = tessera::load_engine_config(argc > 1 ? argv[1] : "", {.world_size = comm->size()});
  Net model;
  auto engine = tessera::initialize(model, config, comm);
  for (int step = 0; step <= 200; ++step) {
    const auto x = at::randn({config.train_micro_batch_size_per_gpu, 16});
    const auto loss = engine->forward(x, x.sum(1, /*keepdim=*/true));
    engine->backward(loss);
    engine->step();
    if (step % 50 == 0 && engine->rank() == 0)
      std::cout << "step " << step << " loss " << loss.item<float>() << '\n';
  }
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
