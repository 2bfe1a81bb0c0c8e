// The speed of the passes over flat shards, in bytes read and written per second, relative to a copy: memcpy,
// or on CUDA (rows "cuda/…", where there is a device) a copy within the device. Pass and copy alternate on
// buffers of one size, far larger than any cache, on the CPU on one thread. `x_copy` is the median ratio: at
// 1 memory is the limit.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <benchmark/benchmark.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "benchmarks/median.h"
#include "comm/shm/reduce.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/str.h"
#include "zero/kernels/adam_8bit.h"
#include "zero/kernels/kernels.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kNumel = 16 << 20;

/// Where the tensors are. On a device several passes are timed together, beside which launching them is
/// little.
struct Place {
  at::Device device = at::kCPU;
  int repeats = 1;

  at::Tensor make(const at::Tensor& tensor) const { return tensor.to(device); }
  void wait() const {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  /// Of one.
  double seconds(const std::function<void()>& body) const {
    wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) body();
    wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
  }
  std::function<void()> copy(const at::Tensor& to, const at::Tensor& from) const {
    if (device.is_cpu()) return [=] { std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); };
    return [=] { at::Tensor(to).copy_(from); };
  }
};

/// `bytes`: what `pass` reads and writes.
void beside_copy(benchmark::State& state, const Place& place, double bytes,
                 const std::function<void()>& pass) {
  const at::Tensor from = place.make(at::zeros({kNumel})), to = place.make(at::zeros({kNumel}));
  const double copied = 2.0 * static_cast<double>(from.nbytes());
  std::vector<double> rates, ratios;
  pass();
  for (auto _ : state) {
    const double mine = place.seconds(pass);
    const double copy = place.seconds(place.copy(to, from));
    state.SetIterationTime(mine);
    rates.push_back(bytes / mine);
    ratios.push_back(bytes / mine / (copied / copy));
  }
  state.counters["GB_per_s"] = median(rates) / 1e9;
  state.counters["x_copy"] = median(ratios);
}

at::Tensor values(at::ScalarType dtype, const Place& place = {}) {
  return place.make(at::randn({kNumel}).mul_(0.01).to(dtype));
}

/// (kNumel) in `num` parts of whole cache lines.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int num) { return tensor.chunk(num); }

/// Of all units of a model at once.
void squared_norms(benchmark::State& state, const Place& place, at::ScalarType dtype, int num_units) {
  const at::Tensor gradient = values(dtype, place);
  const at::Tensor sums = place.make(at::zeros({num_units, 2}, at::kDouble));
  std::vector<int64_t> rows(static_cast<size_t>(num_units));
  std::iota(rows.begin(), rows.end(), 0);
  const std::vector<at::Tensor> units = parts_of(gradient, num_units);
  beside_copy(state, place, static_cast<double>(gradient.nbytes()),
              [&] { kernels::squared_norms(units, sums, rows); });
}

/// fp32 moments and masters. `param`: the dtype of the parameter that is written too; none in fp32. `grad`:
/// of the gradient.
struct Update {
  kernels::OptimizerKind kind;
  at::ScalarType param, grad = at::kFloat;
  int num_segments = 1;
};

std::vector<kernels::SegmentUpdate> cut(const kernels::Segment& whole, const kernels::Hyper& hyper, int num) {
  std::vector<kernels::SegmentUpdate> updates;
  const auto part = [&](const at::Tensor& tensor, int i) {
    return tensor.defined() ? parts_of(tensor, num)[static_cast<size_t>(i)] : tensor;
  };
  for (int i = 0; i < num; ++i) {
    kernels::Segment segment{.master = part(whole.master, i),
                             .grad = part(whole.grad, i),
                             .state = {},
                             .param = part(whole.param, i)};
    for (const at::Tensor& state : whole.state) segment.state.push_back(part(state, i));
    updates.push_back({&hyper, 1, segment});
  }
  return updates;
}

/// AdamW with 8-bit moments; bytes are those of weights, gradient, codes and scales.
void update_8bit(benchmark::State& state, const Place& place) {
  const at::Tensor weights = values(at::kFloat, place), gradient = values(at::kFloat, place);
  const auto moment = [&](bool is_signed) {
    return kernels::Moment8bit{place.make(at::full({kNumel}, kernels::code_of_zero(is_signed), at::kByte)),
                               place.make(at::zeros({kernels::num_blocks_8bit(kNumel)}))};
  };
  const kernels::Moment8bit first = moment(true), second = moment(false);
  const kernels::Hyper hyper{.lr = 1e-6};
  beside_copy(state, place, 3.0 * 4 * kNumel + 4.0 * kNumel,
              [&] { kernels::adam_8bit(weights, gradient, first, second, hyper, 1); });
}

void update(benchmark::State& state, const Place& place, const Update& what) {
  const kernels::Hyper hyper{.lr = 1e-3, .weight_decay = 0.01, .momentum = 0.9};
  kernels::Segment segment{
      .master = values(at::kFloat, place), .grad = values(what.grad, place), .state = {}, .param = {}};
  for (size_t i = 0; i < kernels::state_names(what.kind, hyper).size(); ++i)
    segment.state.push_back(place.make(at::zeros({kNumel})));
  if (what.param != at::kFloat) segment.param = values(what.param, place);
  const auto states = static_cast<double>(segment.state.size());
  const double bytes = kNumel * (static_cast<double>(segment.grad.itemsize()) + 8 + 8 * states +
                                 (what.param != at::kFloat ? 2 : 0));
  std::vector<kernels::SegmentUpdate> updates = cut(segment, hyper, what.num_segments);
  int64_t step = 0;
  beside_copy(state, place, bytes, [&] {
    ++step;
    for (kernels::SegmentUpdate& each : updates) each.step = step;
    kernels::update(what.kind, 0.5, updates);
  });
}

/// Both passes; the first leaves its sums on the device.
void lamb(benchmark::State& state, const Place& place) {
  const kernels::Hyper hyper{.lr = 1e-3, .weight_decay = 0.01};
  const kernels::Segment segment{.master = values(at::kFloat, place),
                                 .grad = values(at::kFloat, place),
                                 .state = {place.make(at::zeros({kNumel})), place.make(at::zeros({kNumel}))},
                                 .param = {}};
  const std::vector<kernels::SegmentUpdate> updates = cut(segment, hyper, 1);
  const at::Tensor sums = place.make(at::zeros({1, 2}, at::kDouble));
  beside_copy(state, place, kNumel * (24.0 + 16.0), [&] {
    kernels::lamb_norms(0.5, updates, sums, {0});
    kernels::lamb_apply(updates, {1.0});
  });
}

/// libtorch's fused AdamW. It takes no clipping factor, so a clipped step needs one more pass over the
/// gradient.
void libtorch_adamw(benchmark::State& state, const Place& place) {
  std::vector<at::Tensor> master{values(at::kFloat, place)}, grad{values(at::kFloat, place)},
      first{place.make(at::zeros({kNumel}))}, second{place.make(at::zeros({kNumel}))};
  std::vector<at::Tensor> steps{place.make(at::ones({}))};
  beside_copy(state, place, kNumel * 28.0, [&] {
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
  beside_copy(state, {},
              static_cast<double>(num_ranks) * static_cast<double>(inputs[0].nbytes()) + kNumel * 4.0,
              [&] { comm::shm::reduce(reduction); });
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(20);
}

/// What runs on the CPU and on a device alike.
void add_passes(const std::string& prefix, const Place& place) {
  add(prefix + "copy", [place](benchmark::State& state) {
    const at::Tensor from = values(at::kFloat, place), to = values(at::kFloat, place);
    beside_copy(state, place, 8.0 * kNumel, place.copy(to, from));
  });
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const int num_units : {1, 64})
      add(str(prefix, "squared_norm/", c10::toString(dtype), "/units_", num_units),
          [=](benchmark::State& state) { squared_norms(state, place, dtype, num_units); });
  const std::pair<const char*, kernels::OptimizerKind> kinds[] = {{"AdamW", kernels::OptimizerKind::kAdamW},
                                                                  {"SGD", kernels::OptimizerKind::kSGD},
                                                                  {"Lion", kernels::OptimizerKind::kLion}};
  for (const auto& [name, kind] : kinds)
    for (const at::ScalarType param : {at::kFloat, at::kBFloat16})
      add(str(prefix, "update_", name, "/", c10::toString(param)),
          [=, kind = kind](benchmark::State& state) { update(state, place, {kind, param}); });
  add(prefix + "update_AdamW/BFloat16/of_a_bf16_gradient", [place](benchmark::State& state) {
    update(state, place, {kernels::OptimizerKind::kAdamW, at::kBFloat16, at::kBFloat16});
  });
  add(prefix + "update_AdamW/Float/segments_64", [place](benchmark::State& state) {
    update(state, place, {kernels::OptimizerKind::kAdamW, at::kFloat, at::kFloat, 64});
  });
  add(prefix + "update_AdamW8bit/Float", [place](benchmark::State& state) { update_8bit(state, place); });
  add(prefix + "update_LAMB/Float", [place](benchmark::State& state) { lamb(state, place); });
  add(prefix + "libtorch_fused_adamw/Float",
      [place](benchmark::State& state) { libtorch_adamw(state, place); });
}

bool has_cuda() {
  try {
    cuda_plugin_symbol("tessera_cuda_update");
    return at::globalContext().hasCUDA();
  } catch (const Error&) {
    return false;
  }
}

void add_all() {
  add_passes("", {});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int num_ranks : {2, 4})
      add(str("reduce/", c10::toString(dtype), "/ranks_", num_ranks),
          [dtype, num_ranks](benchmark::State& state) { add_up(state, dtype, num_ranks); });
  if (has_cuda()) add_passes("cuda/", {at::Device(at::kCUDA, 0), 20});
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
