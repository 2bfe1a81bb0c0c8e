// Memory and time of a training step under each policy of activation recomputation, side by side: one
// process, one rank, the policies take turns in random order. The peak is of the bytes that libtorch's
// allocator gives for activations and temporary tensors during a step; kept: saved tensors held between
// forward and backward.
//
//   bench_activations --gpt small --micro-batch 8 --turns 10
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "activations/checkpointing.h"
#include "activations/chunked_loss.h"
#include "benchmarks/gpt.h"
#include "benchmarks/median.h"
#include "comm/init/self.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "engine/profile/memory_meter.h"

namespace tessera::benchmarks {
namespace {

struct Options {
  std::string gpt = "small";
  int64_t micro_batch = 8, sequence = 0;
  int turns = 10, steps = 3, threads = 1;
  bool autocast = false;
  std::string disk;
};

GptOptions shape_of(const std::string& name) {
  return name == "110m" ? gpt_110m() : name == "33m" ? gpt_33m() : small_gpt();
}

class Contestant {
 public:
  Contestant(std::string name, const std::string& section, const GptOptions& shape, const Options& options)
      : name_(std::move(name)) {
    const std::string json =
        str(R"({"train_micro_batch_size_per_gpu": )", options.micro_batch,
            R"(, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "torch_autocast": {"enabled": )",
            options.autocast ? "true" : "false", R"(}, "activation_checkpointing": )", section, "}");
    engine_ = initialize(Gpt(shape), parse_engine_config(json, {.world_size = 1}, "the benchmark"),
                         std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
    const at::Tensor tokens = at::randint(shape.vocabulary, {options.micro_batch, shape.sequence + 1},
                                          at::make_generator<at::CPUGeneratorImpl>(uint64_t{1}), at::kLong);
    input_ = tokens.narrow(1, 0, shape.sequence).contiguous();
    target_ = tokens.narrow(1, 1, shape.sequence).contiguous();
  }

  void turn(MemoryMeter& meter, int steps) {
    step();
    for (int i = 0; i < steps; ++i) {
      meter.reset_peak();
      const auto start = std::chrono::steady_clock::now();
      step();
      times_.push_back(1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      peak_ = std::max(peak_, meter.peak()[MemoryUse::kActivations]);
    }
  }

  const std::string& name() const { return name_; }
  double median_ms() const { return median(times_); }
  double min_ms() const { return *std::min_element(times_.begin(), times_.end()); }
  int64_t peak() const { return peak_; }
  double loss() const { return loss_; }
  activations::Counts counts() const {
    return engine_->activations() != nullptr ? engine_->activations()->counts() : activations::Counts();
  }

 private:
  void step() {
    const at::Tensor loss = engine_->forward(input_, target_);
    engine_->backward(loss);
    engine_->step();
    loss_ = loss.item<double>();
  }
  std::string name_;
  std::unique_ptr<TypedEngine<GptImpl>> engine_;
  at::Tensor input_, target_;
  std::vector<double> times_;
  int64_t peak_ = 0;
  double loss_ = 0;
};
void run(const Options& options) {
  at::set_num_threads(options.threads);
  GptOptions shape = shape_of(options.gpt);
  if (options.sequence > 0) shape.sequence = options.sequence;
  MemoryMeter meter(c10::DeviceType::CPU);
  std::vector<std::unique_ptr<Contestant>> all;
  const auto add = [&](const std::string& name, const std::string& section,
                       int64_t chunk_rows = 0) -> Contestant& {
    at::manual_seed(1);
    meter.set_default_use(MemoryUse::kOther);
    GptOptions model = shape;
    if (chunk_rows > 0)
      model.loss = [chunk_rows](const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& target) {
        return chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = chunk_rows});
      };
    all.push_back(std::make_unique<Contestant>(name, section, model, options));
    meter.set_default_use(MemoryUse::kActivations);
    return *all.back();
  };
  add("none", R"({"policy": "none"})").turn(meter, 1);
  add("cheap", R"({"policy": "cheap"})").turn(meter, 1);
  add("block", R"({"policy": "block"})").turn(meter, 1);
  for (const int64_t blocks : {shape.layers / 4, shape.layers / 2, 3 * shape.layers / 4})
    add(str("block, ", blocks), str(R"({"policy": "block", "number_checkpoints": )", blocks, "}"))
        .turn(meter, 1);
  if (!options.disk.empty())
    add("offload", str(R"({"policy": "offload", "nvme_path": ")", options.disk, R"("})")).turn(meter, 1);
  add("chunked loss", R"({"policy": "none"})", /*chunk_rows=*/256).turn(meter, 1);
  add("chunked, block", R"({"policy": "block"})", /*chunk_rows=*/256).turn(meter, 1);
  std::mt19937 random(1);
  for (int turn = 0; turn < options.turns; ++turn) {
    std::vector<Contestant*> order;
    for (const auto& contestant : all) order.push_back(contestant.get());
    std::shuffle(order.begin(), order.end(), random);
    for (Contestant* contestant : order) contestant->turn(meter, options.steps);
  }
  std::printf("%-13s %9s %9s %8s %9s %8s %9s %12s\n", "", "step ms", "min ms", "x none", "peak MB", "x none",
              "kept MB", "loss");
  const Contestant& none = *all.front();
  for (const auto& c : all)
    std::printf("%-13s %9.1f %9.1f %8.3f %9.2f %8.3f %9.2f %12.9f\n", c->name().c_str(), c->median_ms(),
                c->min_ms(), c->median_ms() / none.median_ms(), static_cast<double>(c->peak()) / 1e6,
                static_cast<double>(c->peak()) / static_cast<double>(none.peak()),
                static_cast<double>(c->counts().kept_bytes) / 1e6, c->loss());
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  tessera::benchmarks::Options options;
  CLI::App app("Peak memory and step time of each policy of activation_checkpointing");
  app.add_option("--gpt", options.gpt, "The model: small, 33m or 110m")
      ->check(CLI::IsMember({"small", "33m", "110m"}));
  app.add_option("--micro-batch", options.micro_batch, "Sequences a step")->check(CLI::PositiveNumber);
  app.add_option("--sequence", options.sequence, "Tokens of a sequence, in place of the model's own");
  app.add_option("--turns", options.turns, "Turns of each policy")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "Steps a turn, after one that doesn't count");
  app.add_option("--threads", options.threads, "Threads of libtorch")->check(CLI::PositiveNumber);
  app.add_option("--disk", options.disk, "Folder for the policy offload; without it: not measured");
  app.add_flag("--autocast", options.autocast, "In bfloat16, by torch_autocast");
  CLI11_PARSE(app, argc, argv);
  try {
    tessera::benchmarks::run(options);
  } catch (const std::exception& error) {
    std::cerr << "bench_activations: " << error.what() << '\n';
    return 1;
  }
}
