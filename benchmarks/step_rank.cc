// One rank that trains a GPT with the files that peers/train_step.py has written into a folder:
// ds_config.json, weights.safetensors and tokens.bin, (batches, ranks, micro-batch, sequence + 1) int64.
// Prints one JSON line: [What a rank reports] there.
//   tessera launch -n 2 -- step_rank together|alone FOLDER 33m|110m STEPS [BACKEND]
#include <ATen/Parallel.h>
#include <ATen/ops/from_file.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/gpt.h"
#include "comm/init/init.h"
#include "comm/init/self.h"
#include "core/memory/process_memory.h"
#include "engine/config/parse.h"
#include "engine/engine.h"

namespace tessera::benchmarks {
namespace {

constexpr int kWarmUpSteps = 3, kMemorySteps = 2;  // as in peers/train_step_peer.py
constexpr double kMib = 1024 * 1024;

/// This rank's micro-batches, in turns. (batches, micro-batch, sequence + 1) int64
at::Tensor read_tokens(const std::string& path, int64_t num_ranks, int64_t rank, int64_t micro_batch,
                       int64_t sequence) {
  const auto numel = static_cast<int64_t>(std::filesystem::file_size(path) / sizeof(int64_t));
  const at::Tensor all = at::from_file(path, /*shared=*/false, numel, at::kLong);
  return all.view({-1, num_ranks, micro_batch, sequence + 1}).select(1, rank).clone();
}

/// What the interfaces of this host (or network namespace) have received, without the loopback one.
int64_t network_bytes() {
  std::ifstream devices("/proc/net/dev");
  int64_t sum = 0;
  for (std::string line; std::getline(devices, line);) {
    const size_t colon = line.find(':');
    if (colon == line.npos || line.substr(0, colon).ends_with(" lo")) continue;
    sum += std::stoll(line.substr(colon + 1));
  }
  return sum;
}

class Training {
 public:
  Training(const GptOptions& shape, const EngineConfig& config, const comm::CommunicatorPtr& comm,
           const std::string& weights, at::Tensor tokens)
      : engine_(initialize(Gpt(shape), config, comm)), tokens_(std::move(tokens)) {
    engine_->load_weights(weights);
  }

  /// Collective. The mean loss of the micro-steps.
  double step() {
    const int64_t num_micro_steps = engine_->config().gradient_accumulation_steps;
    double total = 0;
    for (int64_t i = 0; i < num_micro_steps; ++i) {
      const at::Tensor tokens = tokens_[num_used_++ % tokens_.size(0)];
      const int64_t length = tokens.size(1) - 1;
      const at::Tensor loss = engine_->forward(tokens.narrow(1, 0, length).contiguous(),
                                               tokens.narrow(1, 1, length).contiguous());
      engine_->backward(loss);
      engine_->step();
      total += loss.item<double>();
    }
    return total / static_cast<double>(num_micro_steps);
  }

 private:
  std::unique_ptr<TypedEngine<GptImpl>> engine_;
  at::Tensor tokens_;
  int64_t num_used_ = 0;
};

nlohmann::json train(const comm::CommunicatorPtr& group, bool alone, const std::string& folder,
                     const GptOptions& shape, int num_steps) {
  const comm::CommunicatorPtr comm =
      alone ? std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)) : group;
  const EngineConfig config = load_engine_config(folder + "/ds_config.json", {.world_size = comm->size()});
  group->barrier("before the model");  // then all ranks share their libraries
  const double idle_bytes = own_bytes(), idle_resident_bytes = peak_resident_bytes();
  Training training(shape, config, comm, folder + "/weights.safetensors",
                    read_tokens(folder + "/tokens.bin", group->size(), group->rank(),
                                config.train_micro_batch_size_per_gpu, shape.sequence));
  std::vector<double> losses, step_ms;
  for (int i = 0; i < kWarmUpSteps; ++i) losses.push_back(training.step());
  group->barrier("after the warm-up");
  const int64_t received_before = network_bytes();
  for (int i = 0; i < num_steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    losses.push_back(training.step());
    step_ms.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  group->barrier("after the timed steps");
  const int64_t received_bytes = network_bytes() - received_before;
  const double peak_bytes = peak_own_bytes([&] {
    for (int i = 0; i < kMemorySteps; ++i) losses.push_back(training.step());
  });
  group->barrier("after the last step");
  return {{"step_ms", step_ms},
          {"losses", losses},
          {"received_bytes", received_bytes},
          {"mib", (peak_bytes - idle_bytes) / kMib},
          {"resident_mib", (peak_resident_bytes() - idle_resident_bytes) / kMib}};
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) try {
  using namespace tessera;
  if (argc < 5 || argc > 6) throw Error("usage: step_rank together|alone FOLDER 33m|110m STEPS [BACKEND]");
  at::set_num_threads(1);
  const GptOptions shape = std::string(argv[3]) == "110m" ? benchmarks::gpt_110m() : benchmarks::gpt_33m();
  const auto group = comm::join({.backend = argc == 6 ? argv[5] : "auto"});
  std::cout
      << benchmarks::train(group, std::string(argv[1]) == "alone", argv[2], shape, std::stoi(argv[4])).dump()
      << std::endl;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}
