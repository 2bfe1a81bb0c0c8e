// The cost of the tap per operator (zero/operators/tap.h), heard by OperatorListener. Every benchmark
// alternates between the same operators without and with the listener; `added_ns` is the difference per call
// of the callback. Times are medians of this thread's CPU time, which a busy machine disturbs little.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <time.h>

#include <functional>
#include <vector>

#include "benchmarks/median.h"
#include "comm/init/self.h"
#include "engine/autocast.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "zero/gather/operator_listener.h"
#include "zero/gathered_parameters.h"
#include "zero/memory/pause_listening.h"

namespace tessera::benchmarks {
namespace {

using Body = std::function<void()>;

constexpr int kTurn = 200;  // calls of the body in a turn

int64_t num_calls = 0;  // of count_call, on this single-threaded program's thread
std::unique_ptr<at::ObserverContext> count_call(const at::RecordFunction&) {
  ++num_calls;
  return nullptr;
}

/// The cost of libtorch's boxing of the inputs and of the call itself.
std::unique_ptr<at::ObserverContext> do_nothing(const at::RecordFunction&) { return nullptr; }

/// Installs a thread-local callback, from construction to destruction.
class Callback {
 public:
  explicit Callback(at::RecordFunctionCallback::StartCallback start)
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(start).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {}
  ~Callback() { at::removeCallback(handle_); }
  Callback(const Callback&) = delete;

 private:
  at::CallbackHandle handle_;
};

int64_t callbacks_in(const Body& body) {
  const Callback counter(&count_call);
  num_calls = 0;
  body();
  return num_calls;
}

double cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

/// Nanoseconds for one call of the body.
double measure_turn(const Body& body) {
  const double start = cpu_ns();
  for (int i = 0; i < kTurn; ++i) body();
  return (cpu_ns() - start) / kTurn;
}

/// The listener, or the engine that has one, must exist before the call.
void compare(benchmark::State& state, const Body& body) {
  const int64_t num_callbacks = callbacks_in(body);
  for (int i = 0; i < kTurn; ++i) body();
  std::vector<double> unheard_ns, heard_ns, added_ns;
  for (auto _ : state) {
    {
      const zero::PauseListening unheard;
      unheard_ns.push_back(measure_turn(body));
    }
    heard_ns.push_back(measure_turn(body));
    added_ns.push_back((heard_ns.back() - unheard_ns.back()) / static_cast<double>(num_callbacks));
    state.SetIterationTime(1e-9 * heard_ns.back());
  }
  state.counters["callbacks"] = static_cast<double>(num_callbacks);
  state.counters["unheard_ns"] = median(unheard_ns);
  state.counters["heard_ns"] = median(heard_ns);
  state.counters["added_ns"] = median(added_ns);
}

/// One tiny Linear under an engine of one rank, after a training step, so that the order of use is known.
class TinyEngine {
 public:
  explicit TinyEngine(int stage, bool autocast = false) {
    EngineConfig config;
    config.train_micro_batch_size_per_gpu = 4;
    config.zero.stage = stage;
    config.autocast.enabled = autocast;
    engine = initialize(model, validated(config, 1),
                        std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
    train_step();
  }

  void train_step() {
    engine->backward(engine->forward(x).sum());
    engine->step();
  }

  torch::nn::Linear model{8, 8};
  at::Tensor x = at::ones({4, 8});
  std::unique_ptr<TypedEngine<torch::nn::LinearImpl>> engine;
};

const at::Tensor& tiny() {
  static const at::Tensor tensor = at::ones({8});
  return tensor;
}

void add_tiny() {
  const at::NoGradGuard no_grad;
  benchmark::DoNotOptimize(at::add(tiny(), tiny()));
}

void forward_backward(torch::nn::LinearImpl& model, const at::Tensor& x) {
  torch::autograd::backward({model.forward(x).sum()}, {});
}

// ---------------------------------------------------------------------------- one operator

void add_callback_that_does_nothing(benchmark::State& state) {
  const Callback callback(&do_nothing);
  compare(state, add_tiny);
}

void add_no_unit(benchmark::State& state) {
  const zero::OperatorListener listener(/*casts=*/false);
  compare(state, add_tiny);
}

void add_no_unit_casts_tracked(benchmark::State& state) {
  const zero::OperatorListener listener(/*casts=*/true);
  compare(state, add_tiny);
}

void add_resident_unit(benchmark::State& state) {
  const TinyEngine tiny_engine(zero::kMaxStage);
  const at::Tensor bias = tiny_engine.model->bias;
  compare(state, [&] {
    const at::NoGradGuard no_grad;
    benchmark::DoNotOptimize(at::add(bias, tiny()));
  });
}

// ------------------------------------------------------------- a Linear, forward and backward

void linear_callback_that_does_nothing(benchmark::State& state) {
  const Callback callback(&do_nothing);
  torch::nn::Linear model(8, 8);
  const at::Tensor x = at::ones({4, 8});
  compare(state, [&] { forward_backward(*model, x); });
}

void linear_no_unit(benchmark::State& state) {
  const zero::OperatorListener listener(/*casts=*/false);
  torch::nn::Linear model(8, 8);
  const at::Tensor x = at::ones({4, 8});
  compare(state, [&] { forward_backward(*model, x); });
}

void linear_resident_unit(benchmark::State& state) {
  // backward() of our own, not the engine's.
  TinyEngine tiny_engine(zero::kMaxStage);
  const zero::GatheredParameters held(tiny_engine.engine->sharded_model(),
                                      {"weight", "bias"});  // unheard, too
  compare(state, [&] {
    tiny_engine.engine->zero_grad();
    forward_backward(*tiny_engine.model, tiny_engine.x);
  });
}

void linear_resident_unit_autocast(benchmark::State& state) {
  TinyEngine tiny_engine(zero::kMaxStage, /*autocast=*/true);
  const zero::GatheredParameters held(tiny_engine.engine->sharded_model(), {"weight", "bias"});
  compare(state, [&] {
    tiny_engine.engine->zero_grad();
    const AutocastScope autocast({.enabled = true}, at::kCPU);
    forward_backward(*tiny_engine.model, tiny_engine.x);
  });
}

// ------------------------------------------------------------------ the engine's fixed costs

/// A whole training step of a tiny model: nothing but the engine's fixed costs, at stage state.range(0).
void engine_step(benchmark::State& state) {
  TinyEngine tiny_engine(static_cast<int>(state.range(0)));
  for (auto _ : state) tiny_engine.train_step();
}

/// Settings of the listener's benchmarks: all reported values are in nanoseconds.
void report(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseManualTime()->Unit(benchmark::kNanosecond)->MinTime(0.002);
}

BENCHMARK(add_callback_that_does_nothing)->Apply(report);
BENCHMARK(add_no_unit)->Apply(report);
BENCHMARK(add_no_unit_casts_tracked)->Apply(report);
BENCHMARK(add_resident_unit)->Apply(report);
BENCHMARK(linear_callback_that_does_nothing)->Apply(report);
BENCHMARK(linear_no_unit)->Apply(report);
BENCHMARK(linear_resident_unit)->Apply(report);
BENCHMARK(linear_resident_unit_autocast)->Apply(report);
BENCHMARK(engine_step)->ArgName("stage")->DenseRange(0, zero::kMaxStage)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
