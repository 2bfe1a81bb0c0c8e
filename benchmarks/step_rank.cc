// One rank that trains a GPT in one way after another and reports the times of its steps. peers/train_step.py
// starts it on CPU ranks and hosts beside peers/step_peer.py, bundle/gpu_check.py on a device.
//   tessera launch -n 2 -- step_rank --device cpu --precision fp32 --ways plain stage_0 stage_3
//   step_rank --layers 12 --dim 768 --heads 12 --micro-batch 16 --ways forward_backward stage_3
//
// forward_backward      the model in the given precision, no engine and no optimizer
// plain                 the same with clipping at norm 1 and libtorch's fused AdamW, its fastest
// alone                 the engine at stage 0, as if there were no other rank
// stage_0 to stage_3    the engine: in bf16 with fp32 masters and gradients, clipping at norm 1, AdamW
//
// Each rank prints one JSON line a way: [What a way reports] in step_peer.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/from_file.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <time.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/init/init.h"
#include "comm/init/self.h"
#include "core/error.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "examples/language_model/model.h"

namespace tessera::benchmarks {
namespace {

constexpr int kMemorySteps = 2;  // as in step_peer.py
constexpr double kMib = 1024 * 1024;
constexpr double kLearningRate = 3e-4, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kWeightDecay = 0.01,
                 kClipping = 1.0;
const std::vector<std::string> kWays{"forward_backward", "plain",   "alone",  "stage_0",
                                     "stage_1",          "stage_2", "stage_3"};

struct Options {
  GptOptions shape{.dim = 768, .layers = 12, .heads = 12, .vocabulary = 50304, .sequence = 1024};
  int64_t micro_batch = 16, accumulation = 1;
  std::string precision = "bf16";
  std::vector<std::string> ways = kWays, overrides;
  std::string weights, tokens;
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
                            {"--micro-batch", &options.micro_batch},
                            {"--accumulation", &options.accumulation}})
    app.add_option(name, *size)->check(CLI::PositiveNumber);
  app.add_option("--precision", options.precision)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--ways", options.ways)->check(CLI::IsMember(kWays));
  app.add_option("--set", options.overrides, "PATH=VALUE, overrides a key of the engine's configuration");
  app.add_option("--weights", options.weights, "What the engine loads (default: random ones)");
  app.add_option("--tokens", options.tokens,
                 "File of (batches, ranks, micro-batch, sequence + 1) int64 (default: one random batch)");
  app.add_option("--device", options.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--backend", options.backend);
  app.add_option("--steps", options.num_steps, "Timed steps")->check(CLI::PositiveNumber);
  app.add_option("--warm-up", options.num_warm_up_steps)->check(CLI::PositiveNumber);
}

struct Batch {
  at::Tensor input, target;  // (B, T) int64, on the device
};

/// This rank's micro-batches.
std::vector<Batch> read_batches(const Options& options, const comm::Communicator& group) {
  const int64_t length = options.shape.sequence;
  at::Tensor tokens;  // (batches, micro-batch, sequence + 1)
  if (options.tokens.empty()) {
    tokens =
        at::randint(options.shape.vocabulary, {1, options.micro_batch, length + 1},
                    at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(group.rank())), at::kLong);
  } else {
    const auto numel = static_cast<int64_t>(std::filesystem::file_size(options.tokens) / sizeof(int64_t));
    tokens = at::from_file(options.tokens, /*shared=*/false, numel, at::kLong)
                 .view({-1, group.size(), options.micro_batch, length + 1})
                 .select(1, group.rank());
  }
  std::vector<Batch> batches;
  for (const at::Tensor& batch : tokens.unbind(0))
    batches.push_back({batch.narrow(1, 0, length).contiguous().to(group.device()),
                       batch.narrow(1, 1, length).contiguous().to(group.device())});
  return batches;
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

class Stopwatch {
 public:
  explicit Stopwatch(clockid_t clock = CLOCK_MONOTONIC) : clock_(clock), last_ms_(now_ms()) {}
  /// Milliseconds since the last call.
  double lap() {
    const double now = now_ms();
    return now - std::exchange(last_ms_, now);
  }

 private:
  double now_ms() const {
    timespec time{};
    clock_gettime(clock_, &time);
    return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
  }

  clockid_t clock_;
  double last_ms_;
};

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

 private:
  at::Device device_;
};

/// One way of training: the phases of a micro-step.
struct Way {
  std::function<at::Tensor(const Batch&)> forward;
  std::function<void(const at::Tensor&)> backward;
  std::function<void()> update;
};

/// Milliseconds of steps. CPU time is that of all the rank's threads; a busy machine disturbs it little.
struct Times {
  std::vector<double> step, forward, backward, update, cpu;
};

class Training {
 public:
  Training(Way way, std::vector<Batch> batches, const Options& options, at::Device device)
      : way_(std::move(way)), batches_(std::move(batches)), options_(options), meter_(device) {}

  /// Collective. `waiting`: each phase waits for the device, so that the phases overlap less and their sum is
  /// more than a step.
  Times steps(int num_steps, bool waiting = false) {
    Times times;
    for (int i = 0; i < num_steps; ++i) step(times, waiting);
    return times;
  }

  const DeviceMeter& meter() const { return meter_; }
  const std::vector<double>& losses() const { return losses_; }

 private:
  void step(Times& times, bool waiting) {
    Stopwatch whole, phase, cpu(CLOCK_PROCESS_CPUTIME_ID);
    const auto lap = [&] {
      if (waiting) meter_.synchronize();
      return phase.lap();
    };
    double forward_ms = 0, backward_ms = 0, update_ms = 0;
    std::vector<at::Tensor> losses;
    for (int64_t i = 0; i < options_.accumulation; ++i) {
      const at::Tensor loss = way_.forward(batches_[num_used_++ % batches_.size()]);
      forward_ms += lap();
      way_.backward(loss);
      backward_ms += lap();
      way_.update();
      update_ms += lap();
      losses.push_back(loss.detach());
    }
    meter_.synchronize();
    times.step.push_back(whole.lap());
    times.forward.push_back(forward_ms);
    times.backward.push_back(backward_ms);
    times.update.push_back(update_ms);
    times.cpu.push_back(cpu.lap());
    losses_.push_back(at::stack(losses).to(at::kDouble).mean().item<double>());
  }

  Way way_;
  std::vector<Batch> batches_;
  const Options& options_;
  DeviceMeter meter_;
  size_t num_used_ = 0;
  std::vector<double> losses_;
};

/// Memory of this process before it has a model.
struct Idle {
  double own_bytes = tessera::own_bytes(), peak_resident_bytes = tessera::peak_resident_bytes();
};

nlohmann::json measure(Training training, const Options& options, comm::Communicator& group,
                       const Idle& idle) {
  training.steps(options.num_warm_up_steps);
  training.meter().reset_peak();
  group.barrier("after the warm-up");
  const int64_t received_before = network_bytes();
  Times times = training.steps(options.num_steps);
  group.barrier("after the timed steps");
  const int64_t received_bytes = network_bytes() - received_before;
  double peak_own = idle.own_bytes;
  if (group.device().is_cpu()) {
    peak_own = peak_own_bytes([&] { training.steps(kMemorySteps); });
  } else {
    const Times phases = training.steps((options.num_steps + 1) / 2, /*waiting=*/true);
    times.forward = phases.forward, times.backward = phases.backward, times.update = phases.update;
  }
  return {{"step_ms", times.step},
          {"forward_ms", times.forward},
          {"backward_ms", times.backward},
          {"update_ms", times.update},
          {"cpu_ms", times.cpu},
          {"losses", training.losses()},
          {"received_bytes", received_bytes},
          {"mib", (peak_own - idle.own_bytes) / kMib},
          {"resident_mib", (peak_resident_bytes() - idle.peak_resident_bytes) / kMib},
          {"peak_bytes", training.meter().peak_bytes()}};
}

/// libtorch's fused AdamW over all parameters of a model.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& parameter : parameters_) {
      first_moments_.push_back(at::zeros_like(parameter, at::TensorOptions().requires_grad(false)));
      second_moments_.push_back(at::zeros_like(parameter, at::TensorOptions().requires_grad(false)));
      num_steps_.push_back(at::zeros({}, parameter.options().dtype(at::kFloat)));
    }
  }

  void clip_and_step() {
    const at::NoGradGuard no_grad;
    torch::nn::utils::clip_grad_norm_(parameters_, kClipping);
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    for (const at::Tensor& num_steps : num_steps_) at::Tensor(num_steps).add_(1);
    at::_fused_adamw_(parameters_, gradients, first_moments_, second_moments_, {}, num_steps_, kLearningRate,
                      kBeta1, kBeta2, kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
  }

 private:
  std::vector<at::Tensor> parameters_, first_moments_, second_moments_, num_steps_;
};

/// Without the engine. It does not communicate.
nlohmann::json train_plainly(const Options& options, bool with_optimizer, comm::Communicator& group,
                             const Idle& idle) {
  if (!options.weights.empty())
    throw Error("--weights: found with a way that has no engine; expected engine ways only");
  Gpt model(options.shape);
  model->to(group.device(), options.precision == "bf16" ? at::kBFloat16 : at::kFloat);
  const std::vector<at::Tensor> parameters = model->parameters();
  FusedAdamW optimizer(with_optimizer ? parameters : std::vector<at::Tensor>());
  int64_t num_micro_steps = 0;
  Way way;
  way.forward = [&](const Batch& batch) { return model->forward(batch.input, batch.target); };
  way.backward = [&](const at::Tensor& loss) {
    torch::autograd::backward(
        {options.accumulation == 1 ? loss : loss / static_cast<double>(options.accumulation)}, {});
  };
  way.update = [&] {
    if (++num_micro_steps % options.accumulation != 0) return;
    if (with_optimizer) optimizer.clip_and_step();
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
  };
  nlohmann::json report =
      measure(Training(way, read_batches(options, group), options, group.device()), options, group, idle);
  int64_t numel = 0;
  for (const at::Tensor& parameter : parameters) numel += parameter.numel();
  // Parameters and gradients, and AdamW's two moments.
  report["state_bytes"] = (with_optimizer ? 4 : 2) * numel * parameters.front().element_size();
  return report;
}

EngineConfig config_of(const Options& options, const std::string& stage, int world_size) {
  const std::string json = str(
      R"({"train_micro_batch_size_per_gpu": )", options.micro_batch, R"(, "gradient_accumulation_steps": )",
      options.accumulation, R"(, "gradient_clipping": )", kClipping, R"(, "bf16": {"enabled": )",
      options.precision == "bf16" ? "true" : "false", R"(}, "data_types": {"grad_accum_dtype": "fp32"},
      "zero_optimization": {"stage": )",
      stage, R"(}, "optimizer": {"type": "AdamW", "params": {"lr": )", kLearningRate, R"(, "betas": [)",
      kBeta1, ", ", kBeta2, R"(], "eps": )", kEps, R"(, "weight_decay": )", kWeightDecay, "}}}");
  return parse_engine_config(json, {.world_size = world_size, .overrides = options.overrides},
                             "the benchmark's configuration");
}

nlohmann::json train_by_engine(const Options& options, const std::string& stage,
                               const comm::CommunicatorPtr& comm, comm::Communicator& group,
                               const Idle& idle) {
  const auto engine = initialize(Gpt(options.shape), config_of(options, stage, comm->size()), comm,
                                 {.device = comm->device()});
  if (!options.weights.empty()) engine->load_weights(options.weights);
  Way way;
  way.forward = [&](const Batch& batch) { return engine->forward(batch.input, batch.target); };
  way.backward = [&](const at::Tensor& loss) { engine->backward(loss); };
  way.update = [&] { engine->step(); };
  nlohmann::json report =
      measure(Training(way, read_batches(options, group), options, group.device()), options, group, idle);
  report["state_bytes"] = engine->measured_bytes().total();
  report["formula_bytes"] = engine->formula_bytes().total();
  return report;
}

/// Collective.
nlohmann::json train(const Options& options, const std::string& way, const comm::CommunicatorPtr& group) {
  at::manual_seed(1);
  group->barrier("before the model");  // then all ranks share their libraries
  const Idle idle;
  if (way == "forward_backward" || way == "plain")
    return train_plainly(options, way == "plain", *group, idle);
  if (way == "alone") {
    const comm::SimulatedGroup self{.timeout = std::chrono::minutes(1), .device = group->device()};
    return train_by_engine(options, "0", std::make_shared<comm::SelfCommunicator>(self), *group, idle);
  }
  return train_by_engine(options, way.substr(way.find('_') + 1), group, *group, idle);
}

int run(int argc, char** argv) {
  CLI::App app("A training step of a GPT on ranks and their device");
  Options options;
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  if (options.shape.dim % options.shape.heads != 0) throw Error("--dim must be a multiple of --heads");
  if (options.device == "cpu") at::set_num_threads(1);
  const auto group = comm::join({.backend = options.backend, .device = options.device});
  for (const std::string& way : options.ways) {
    nlohmann::json report = train(options, way, group);
    report["way"] = way;
    group->barrier("after a way");
    std::cout << report.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  try {
    return tessera::benchmarks::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "step_rank: " << error.what() << '\n';
    return 1;
  }
}
