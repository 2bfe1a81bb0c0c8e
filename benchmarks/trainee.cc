#include "benchmarks/trainee.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>

#include <time.h>

#include <chrono>
#include <utility>

#include "comm/init/init.h"
#include "comm/init/self.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/engine.h"

namespace tessera::benchmarks {
namespace {

constexpr double kLearningRate = 3e-4, kWeightDecay = 0.01, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8,
                 kClipping = 1.0;

double seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Stopwatch {
 public:
  explicit Stopwatch(clockid_t clock = CLOCK_MONOTONIC) : clock_(clock), last_(seconds(clock)) {}
  /// Seconds since the last call.
  double lap() {
    const double now = seconds(clock_);
    return now - std::exchange(last_, now);
  }

 private:
  clockid_t clock_;
  double last_;
};

struct Batch {
  at::Tensor input, target;  // (B, T) int64
};

/// A batch that differs between ranks; its values do not affect the time.
Batch make_batch(const Task& task, int rank) {
  const at::Tensor tokens =
      at::randint(task.shape.vocabulary, {task.micro_batch, task.shape.sequence + 1},
                  at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank)), at::kLong);
  return {tokens.narrow(1, 0, task.shape.sequence).contiguous(),
          tokens.narrow(1, 1, task.shape.sequence).contiguous()};
}

/// Without Tessera: the model, clip_grad_norm_, and libtorch's fused AdamW, its fastest.
class PlainTrainee final : public Trainee {
 public:
  explicit PlainTrainee(const Task& task)
      : model_(task.shape), batch_(make_batch(task, 0)), parameters_(model_->parameters()) {
    for (const at::Tensor& parameter : parameters_) {
      first_moments_.push_back(at::zeros_like(parameter, at::TensorOptions().requires_grad(false)));
      second_moments_.push_back(at::zeros_like(parameter, at::TensorOptions().requires_grad(false)));
      num_steps_.push_back(at::zeros({}));
    }
  }

  StepTimes step() override {
    StepTimes times;
    Stopwatch phase;
    const at::Tensor loss = model_->forward(batch_.input, batch_.target);
    times.forward_s = phase.lap();
    torch::autograd::backward({loss}, {});
    times.backward_s = phase.lap();
    update();
    times.update_s = phase.lap();
    times.step_s = whole_.lap();
    times.cpu_s = cpu_.lap();
    return times;
  }

  int64_t state_bytes() const override { return 16 * num_parameters(); }
  int64_t num_parameters() const override {
    int64_t numel = 0;
    for (const at::Tensor& parameter : parameters_) numel += parameter.numel();
    return numel;
  }

 private:
  void update() {
    const at::NoGradGuard no_grad;
    torch::nn::utils::clip_grad_norm_(parameters_, kClipping);
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    for (const at::Tensor& num_steps : num_steps_) at::Tensor(num_steps).add_(1);
    at::_fused_adamw_(parameters_, gradients, first_moments_, second_moments_, {}, num_steps_, kLearningRate,
                      kBeta1, kBeta2, kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();  // zero_grad(set_to_none)
  }

  Gpt model_;
  Batch batch_;
  std::vector<at::Tensor> parameters_, first_moments_, second_moments_, num_steps_;
  Stopwatch whole_, cpu_{CLOCK_PROCESS_CPUTIME_ID};
};

std::string stage_of(Mode mode) {
  switch (mode) {
    case Mode::kStage1: return "1";
    case Mode::kStage2: return "2";
    case Mode::kStage3: return "3";
    default: return "0";
  }
}

EngineConfig config_of(const Task& task, int world_size) {
  const std::string json =
      str(R"({"train_micro_batch_size_per_gpu": )", task.micro_batch, R"(, "gradient_clipping": )", kClipping,
          R"(, "zero_optimization": {"stage": )", stage_of(task.mode), R"(},
      "optimizer": {"type": "AdamW", "params": {"lr": )",
          kLearningRate, R"(, "betas": [)", kBeta1, ", ", kBeta2, R"(], "eps": )", kEps,
          R"(, "weight_decay": )", kWeightDecay, "}}}");
  return parse_engine_config(json, {.world_size = world_size, .overrides = task.overrides},
                             "the benchmark's configuration");
}

class EngineTrainee final : public Trainee {
 public:
  EngineTrainee(const Task& task, const comm::CommunicatorPtr& comm)
      : batch_(make_batch(task, comm->rank())),
        engine_(initialize(Gpt(task.shape), config_of(task, comm->size()), comm)) {}

  StepTimes step() override {
    StepTimes times;
    Stopwatch phase;
    const at::Tensor loss = engine_->forward(batch_.input, batch_.target);
    times.forward_s = phase.lap();
    engine_->backward(loss);
    times.backward_s = phase.lap();
    engine_->step();
    times.update_s = phase.lap();
    times.step_s = whole_.lap();
    times.cpu_s = cpu_.lap();
    return times;
  }

  int64_t state_bytes() const override { return engine_->sharded_model().measured_bytes().total(); }
  int64_t num_parameters() const override {
    int64_t numel = 0;
    for (const zero::ParameterSpec& spec : engine_->sharded_model().layout().parameters())
      numel += spec.numel();
    return numel;
  }

 private:
  Batch batch_;
  std::unique_ptr<TypedEngine<GptImpl>> engine_;
  Stopwatch whole_, cpu_{CLOCK_PROCESS_CPUTIME_ID};
};

}  // namespace

std::string name_of(Mode mode) {
  switch (mode) {
    case Mode::kPlain: return "plain";
    case Mode::kEngineAlone: return "engine_alone";
    default: return "stage_" + stage_of(mode);
  }
}

std::unique_ptr<Trainee> make_trainee(const Task& task) {
  if (task.mode == Mode::kPlain) return std::make_unique<PlainTrainee>(task);
  if (task.mode == Mode::kEngineAlone)
    return std::make_unique<EngineTrainee>(task,
                                           std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
  return std::make_unique<EngineTrainee>(task, comm::join());
}

}  // namespace tessera::benchmarks
