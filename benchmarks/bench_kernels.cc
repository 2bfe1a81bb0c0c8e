// The speed of the passes over flat shards, in bytes read and written per second, relative to memcpy. Pass
// and memcpy alternate on buffers of one size, far larger than any cache, on one thread. `x_memcpy` is the
// median ratio: at 1 memory is the limit.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/median.h"
#include "comm/shm/reduce.h"
#include "core/str.h"
#include "zero/kernels/kernels.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kNumel = 16 << 20;

double seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// `bytes`: what `pass` reads and writes.
void beside_memcpy(benchmark::State& state, double bytes, const std::function<void()>& pass) {
  const at::Tensor from = at::zeros({kNumel}), to = at::zeros({kNumel});
  const double copied = 2.0 * static_cast<double>(from.nbytes());
  std::vector<double> rates, ratios;
  pass();
  for (auto _ : state) {
    const double mine = seconds(pass);
    const double copy = seconds([&] { std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); });
    state.SetIterationTime(mine);
    rates.push_back(bytes / mine);
    ratios.push_back(bytes / mine / (copied / copy));
  }
  state.counters["GB_per_s"] = median(rates) / 1e9;
  state.counters["x_memcpy"] = median(ratios);
}

at::Tensor values(at::ScalarType dtype) { return at::randn({kNumel}).mul_(0.01).to(dtype); }

void squared_norm(benchmark::State& state, at::ScalarType dtype) {
  const at::Tensor gradient = values(dtype);
  beside_memcpy(state, static_cast<double>(gradient.nbytes()),
                [&] { benchmark::DoNotOptimize(kernels::squared_norm(gradient)); });
}

/// fp32 moments and masters. `param`: the dtype of the parameter that is written too; none in fp32.
void update(benchmark::State& state, kernels::OptimizerKind kind, at::ScalarType param) {
  kernels::Hyper hyper{.lr = 1e-3, .weight_decay = 0.01, .momentum = 0.9};
  kernels::Segment segment{
      .master = values(at::kFloat), .grad = values(at::kFloat), .state = {}, .param = {}};
  for (size_t i = 0; i < kernels::state_names(kind, hyper).size(); ++i)
    segment.state.push_back(at::zeros({kNumel}));
  if (param != at::kFloat) segment.param = values(param);
  const double states = static_cast<double>(segment.state.size());
  const double bytes = kNumel * (4 + 8 + 8 * states + (param != at::kFloat ? 2 : 0));
  int64_t step = 0;
  beside_memcpy(state, bytes, [&] { kernels::update(kind, hyper, ++step, 0.5, segment); });
}

/// libtorch's fused AdamW. It takes no clipping factor, so a clipped step needs one more pass over the
/// gradient.
void libtorch_adamw(benchmark::State& state) {
  std::vector<at::Tensor> master{values(at::kFloat)}, grad{values(at::kFloat)}, first{at::zeros({kNumel})},
      second{at::zeros({kNumel})};
  std::vector<at::Tensor> steps{at::ones({})};
  beside_memcpy(state, kNumel * 28.0, [&] {
    at::_fused_adamw_(master, grad, first, second, {}, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8, /*amsgrad=*/false,
                      /*maximize=*/false);
  });
}

/// The reduction of `num_ranks` inputs into fp32.
void add_up(benchmark::State& state, at::ScalarType dtype, int num_ranks) {
  std::vector<at::Tensor> inputs;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < num_ranks; ++rank) {
    inputs.push_back(values(dtype));
    pointers.push_back(inputs.back().data_ptr());
  }
  const at::Tensor output = at::zeros({kNumel});
  const comm::shm::Reduction reduction{.dtype = dtype == at::kBFloat16 ? DType::kBFloat16 : DType::kFloat32,
                                       .inputs = pointers.data(),
                                       .num_inputs = num_ranks,
                                       .numel = kNumel,
                                       .output = {.data = output.data_ptr(), .scale = 0.5}};
  beside_memcpy(state,
                static_cast<double>(num_ranks) * static_cast<double>(inputs[0].nbytes()) + kNumel * 4.0,
                [&] { comm::shm::reduce(reduction); });
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(20);
}

void add_all() {
  add("memcpy", [](benchmark::State& state) {
    const at::Tensor from = values(at::kFloat), to = values(at::kFloat);
    beside_memcpy(state, 8.0 * kNumel, [&] { std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); });
  });
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    add(str("squared_norm/", c10::toString(dtype)),
        [dtype](benchmark::State& state) { squared_norm(state, dtype); });
  const std::pair<const char*, kernels::OptimizerKind> kinds[] = {{"AdamW", kernels::OptimizerKind::kAdamW},
                                                                  {"SGD", kernels::OptimizerKind::kSGD},
                                                                  {"Lion", kernels::OptimizerKind::kLion}};
  for (const auto& [name, kind] : kinds)
    for (const at::ScalarType param : {at::kFloat, at::kBFloat16})
      add(str("update_", name, "/", c10::toString(param)),
          [kind = kind, param](benchmark::State& state) { update(state, kind, param); });
  add("libtorch_fused_adamw/Float", libtorch_adamw);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int num_ranks : {2, 4})
      add(str("reduce/", c10::toString(dtype), "/ranks_", num_ranks),
          [dtype, num_ranks](benchmark::State& state) { add_up(state, dtype, num_ranks); });
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) {
  at::set_num_threads(1);
  tessera::benchmarks::add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
