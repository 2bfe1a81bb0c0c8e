// The time of a training step of a GPT on the ranks' device, and what it holds there: beside the rows that
// benchmarks/device/step_peer.py prints of PyTorch for the same shape.
//   device_step --layers 12 --dim 768 --heads 12 --micro-batch 16 --ways forward_backward stage_0 stage_3
//   tessera launch -n 2 -- device_step --backend nccl ...
// Ways: forward_backward (the model in pure bf16, no engine) and stage_0 to stage_3 (bf16 with fp32 masters
// and fp32 gradients, clipping at norm 1, AdamW). Rank 0 prints one JSON line a way: [What a way reports] in
// step_peer.py.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/gpt.h"
#include "benchmarks/median.h"
#include "comm/init/init.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/engine.h"

namespace tessera::benchmarks {
namespace {

constexpr char kPlain[] = "forward_backward";
constexpr char kStagePrefix[] = "stage_";

struct Options {
  GptOptions shape{.dim = 768, .layers = 12, .heads = 12, .vocabulary = 50304, .sequence = 1024};
  int64_t micro_batch = 16;
  std::vector<std::string> ways{kPlain, "stage_0", "stage_1", "stage_2", "stage_3"};
  std::vector<std::string> overrides;
  std::string device = "cuda", backend = "auto";
  int num_steps = 20;
  int num_warm_up_steps = 3;  ///< the first records the order of use, the second allocates for replaying it
};

void add_options(CLI::App& app, Options& options) {
  for (auto [name, size] : {std::pair{"--dim", &options.shape.dim},
                            {"--layers", &options.shape.layers},
                            {"--heads", &options.shape.heads},
                            {"--vocabulary", &options.shape.vocabulary},
                            {"--sequence", &options.shape.sequence},
                            {"--micro-batch", &options.micro_batch}})
    app.add_option(name, *size)->check(CLI::PositiveNumber);
  app.add_option("--ways", options.ways)
      ->check(CLI::IsMember({kPlain, "stage_0", "stage_1", "stage_2", "stage_3"}));
  app.add_option("--set", options.overrides, "PATH=VALUE, overrides a key of the engine's configuration");
  app.add_option("--device", options.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--backend", options.backend);
  app.add_option("--steps", options.num_steps, "Timed steps")->check(CLI::PositiveNumber);
  app.add_option("--warm-up", options.num_warm_up_steps)->check(CLI::PositiveNumber);
}

struct Batch {
  at::Tensor input, target;  // (B, T) int64, on the device
};

Batch make_batch(const Options& options, const comm::Communicator& comm) {
  const at::Tensor tokens =
      at::randint(options.shape.vocabulary, {options.micro_batch, options.shape.sequence + 1},
                  at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(comm.rank())), at::kLong);
  return {tokens.narrow(1, 0, options.shape.sequence).contiguous().to(comm.device()),
          tokens.narrow(1, 1, options.shape.sequence).contiguous().to(comm.device())};
}

/// The device's work and the bytes of its tensors. On the CPU work is done when a call returns, and no bytes
/// are counted.
class DeviceMeter {
 public:
  explicit DeviceMeter(at::Device device) : device_(device) {}
  void synchronize() const {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }
  /// Until the next call of peak_bytes().
  void reset_peak() const {
    if (!device_.is_cpu()) c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  }
  /// Of all tensors of this process: what torch.cuda.max_memory_allocated() says in Python.
  int64_t peak_bytes() const {
    if (device_.is_cpu()) return 0;
    return c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index()).allocated_bytes[0].peak;
  }
  /// Milliseconds until the device has done `body`.
  double ms(const std::function<void()>& body) const {
    const auto start = std::chrono::steady_clock::now();
    body();
    synchronize();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  at::Device device_;
};

/// The three phases of a step. `forward` leaves the loss behind.
struct Phases {
  std::function<at::Tensor()> forward;
  std::function<void(const at::Tensor&)> backward;
  std::function<void()> step;
};

nlohmann::json measure(const Options& options, const Phases& phases, const DeviceMeter& meter) {
  at::Tensor loss;
  const auto whole = [&] {
    loss = phases.forward();
    phases.backward(loss);
    phases.step();
  };
  whole();
  const double first_loss = loss.item<double>();
  for (int i = 1; i < options.num_warm_up_steps; ++i) whole();
  meter.synchronize();
  meter.reset_peak();
  std::vector<double> ms, forward_ms, backward_ms, step_ms;
  for (int i = 0; i < options.num_steps; ++i) ms.push_back(meter.ms(whole));
  // The phases wait for the device one by one, and so overlap less: their sum is more than a step.
  for (int i = 0; i < (options.num_steps + 1) / 2; ++i) {
    forward_ms.push_back(meter.ms([&] { loss = phases.forward(); }));
    backward_ms.push_back(meter.ms([&] { phases.backward(loss); }));
    step_ms.push_back(meter.ms([&] { phases.step(); }));
  }
  return {{"ms", median(ms)},
          {"forward_ms", median(forward_ms)},
          {"backward_ms", median(backward_ms)},
          {"step_ms", median(step_ms)},
          {"loss", first_loss},
          {"peak_bytes", meter.peak_bytes()}};
}

nlohmann::json forward_and_backward(const Options& options, const comm::CommunicatorPtr& comm) {
  Gpt model(options.shape);
  model->to(comm->device(), at::kBFloat16);
  const Batch batch = make_batch(options, *comm);
  const std::vector<at::Tensor> parameters = model->parameters();
  return measure(options,
                 {.forward = [&] { return model->forward(batch.input, batch.target); },
                  .backward = [&](const at::Tensor& loss) { torch::autograd::backward({loss}, {}); },
                  .step =
                      [&] {
                        for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
                      }},
                 DeviceMeter(comm->device()));
}

nlohmann::json engine_step(const Options& options, const std::string& stage,
                           const comm::CommunicatorPtr& comm) {
  const std::string text = str(R"({"train_micro_batch_size_per_gpu": )", options.micro_batch,
                               R"(, "gradient_clipping": 1.0, "bf16": {"enabled": true},
      "zero_optimization": {"stage": )",
                               stage, R"(}, "optimizer": {"type": "AdamW", "params":
      {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}}})");
  const EngineConfig config = parse_engine_config(
      text, {.world_size = comm->size(), .overrides = options.overrides}, "the benchmark's configuration");
  const auto engine = initialize(Gpt(options.shape), config, comm, {.device = comm->device()});
  const Batch batch = make_batch(options, *comm);
  nlohmann::json row = measure(options,
                               {.forward = [&] { return engine->forward(batch.input, batch.target); },
                                .backward = [&](const at::Tensor& loss) { engine->backward(loss); },
                                .step = [&] { engine->step(); }},
                               DeviceMeter(comm->device()));
  row["state_bytes"] = engine->measured_bytes().total();
  row["formula_bytes"] = engine->formula_bytes().total();
  return row;
}

int run(int argc, char** argv) {
  CLI::App app("A training step on the ranks' device");
  Options options;
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  if (options.shape.dim % options.shape.heads != 0) throw Error("--dim must be a multiple of --heads");
  const auto comm = comm::join({.backend = options.backend, .device = options.device});
  for (const std::string& way : options.ways) {
    at::manual_seed(1);
    nlohmann::json row = way == kPlain
                             ? forward_and_backward(options, comm)
                             : engine_step(options, way.substr(std::string(kStagePrefix).size()), comm);
    row["way"] = way;
    comm->barrier("after a way");
    if (comm->rank() == 0) std::cout << row.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  try {
    return tessera::benchmarks::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "device_step: " << error.what() << '\n';
    return 1;
  }
}
