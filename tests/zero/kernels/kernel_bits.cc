// Prints a digest of what each CPU loop makes of the same numbers: a line "NAME DIGEST" each. Compiled once
// as the product is, and once for each x86-64 level alone (CMakeLists.txt); kernel_bits_test.py compares what
// they print. Exits with 77 on a machine that does not have the level.
#include <xxhash.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "comm/shm/reduce.h"
#include "core/float_bits.h"
#include "zero/kernels/make_rule.h"
#include "zero/kernels/passes.h"

namespace tessera::testing {
namespace {

using kernels::OptimizerKind;
constexpr int64_t kNumel = 10'007;  // no multiple of any vector, nor of a block

using Floats = std::vector<float>;
using Bytes = std::vector<unsigned char>;

/// Of every magnitude fp16 has, subnormals and what overflows it included.
Floats numbers(uint32_t seed, bool positive = false) {
  std::mt19937 bits(seed);
  Floats values(kNumel);
  for (float& value : values) {
    const float fraction = static_cast<float>(bits() >> 8) * 0x1p-24f;
    value = std::ldexp(1 + fraction, static_cast<int>(bits() % 44) - 27);
    if (!positive && bits() % 2 == 0) value = -value;
  }
  return values;
}

Bytes as(DType dtype, const Floats& values) {
  Bytes bytes(values.size() * static_cast<size_t>(size_bytes(dtype)));
  for (size_t i = 0; i < values.size(); ++i)
    kernels::store_element(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  return bytes;
}

class Digest {
 public:
  Digest() { XXH3_64bits_reset(&state_); }
  template <class T>
  Digest& add(const std::vector<T>& values) {
    XXH3_64bits_update(&state_, values.data(), values.size() * sizeof(T));
    return *this;
  }
  Digest& add(double value) {
    XXH3_64bits_update(&state_, &value, sizeof value);
    return *this;
  }
  void print(const std::string& name) {
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(XXH3_64bits_digest(&state_)));
  }

 private:
  XXH3_state_t state_;
};

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

std::string name_of(const char* pass, DType dtype) {
  return std::string(pass) + "/" + std::string(tessera::name_of(dtype));
}

kernels::UpdateArgs args_of(Floats& master, Floats& first, Floats& second, Floats& third, const Bytes& grad,
                            Bytes& param, DType dtype) {
  return {.numel = kNumel,
          .master = master.data(),
          .state0 = first.data(),
          .state1 = second.data(),
          .state2 = third.data(),
          .grad = grad.data(),
          .param = param.data(),
          .grad_dtype = dtype,
          .param_dtype = dtype,
          .grad_scale = 0.37f};
}

void update(const char* name, OptimizerKind kind, double momentum, DType dtype, bool more = false) {
  Floats master = numbers(1), first = numbers(2, kind == OptimizerKind::kRMSprop),
         second = numbers(3, /*positive=*/true), third = numbers(6, /*positive=*/true);
  const Bytes grad = as(dtype, numbers(4));
  Bytes param(grad.size());
  const kernels::Hyper hyper{.lr = 0.01,
                             .weight_decay = 0.1,
                             .momentum = momentum,
                             .nesterov = momentum != 0,
                             .centered = more,
                             .amsgrad = more};
  kernels::cpu::update(kernels::make_rule(kind, hyper, 3),
                       args_of(master, first, second, third, grad, param, dtype));
  Digest().add(master).add(first).add(second).add(third).add(param).print(name_of(name, dtype));
}

void lamb(DType dtype) {
  Floats master = numbers(1), first = numbers(2), second = numbers(3, /*positive=*/true), third;
  const Bytes grad = as(dtype, numbers(4));
  Bytes param(grad.size());
  const kernels::UpdateArgs args = args_of(master, first, second, third, grad, param, dtype);
  const kernels::LambRule rule = kernels::make_lamb_rule({.lr = 0.01, .weight_decay = 0.1}, 3);
  const kernels::LambPart norms = kernels::cpu::lamb_norms(rule, args);
  kernels::cpu::lamb_apply(rule, 0.02f, args);
  Digest()
      .add(norms.weight_sq)
      .add(norms.update_sq)
      .add(master)
      .add(first)
      .add(second)
      .add(param)
      .print(name_of("lamb", dtype));
}

void squared_norm(DType dtype) {
  Floats values = numbers(5);
  if (dtype == DType::kFloat16)
    for (float& value : values) value = std::fmin(std::fmax(value, -65504.0f), 65504.0f);
  const Bytes finite = as(dtype, values);
  values[77] = NAN;
  const Bytes damaged = as(dtype, values);
  const kernels::NormPart clean = kernels::cpu::squared_norm({finite.data(), dtype, kNumel});
  const kernels::NormPart rest = kernels::cpu::squared_norm({damaged.data(), dtype, kNumel});
  Digest()
      .add(clean.sum_of_squares)
      .add(rest.sum_of_squares)
      .add(static_cast<double>(rest.num_nonfinite))
      .print(name_of("squared_norm", dtype));
}

void sum(DType dtype, int num_ranks, bool add) {
  std::vector<Bytes> inputs;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < num_ranks; ++rank)
    inputs.push_back(as(dtype, numbers(static_cast<uint32_t>(10 + rank))));
  for (const Bytes& input : inputs) pointers.push_back(input.data());
  Floats output = numbers(20);
  comm::shm::reduce({.dtype = dtype,
                     .inputs = pointers.data(),
                     .num_inputs = num_ranks,
                     .numel = kNumel,
                     .output = {.data = output.data(), .scale = 0.37, .add = add}});
  Digest().add(output).print(name_of(add ? "sum_and_add" : "sum", dtype) + "/" + std::to_string(num_ranks));
}

void print_all() {
  for (const DType dtype : kDtypes) {
    update("adam", OptimizerKind::kAdam, 0, dtype);
    update("adamw", OptimizerKind::kAdamW, 0, dtype);
    update("sgd", OptimizerKind::kSGD, 0, dtype);
    update("momentum", OptimizerKind::kSGD, 0.9, dtype);
    update("adagrad", OptimizerKind::kAdagrad, 0, dtype);
    update("amsgrad", OptimizerKind::kAdamW, 0, dtype, /*more=*/true);
    update("rmsprop", OptimizerKind::kRMSprop, 0, dtype);
    update("rmsprop_momentum", OptimizerKind::kRMSprop, 0.9, dtype);
    update("rmsprop_centered", OptimizerKind::kRMSprop, 0.9, dtype, /*more=*/true);
    update("lion", OptimizerKind::kLion, 0, dtype);
    lamb(dtype);
    squared_norm(dtype);
    for (const int num_ranks : {1, 2, 5})
      for (const bool add : {false, true}) sum(dtype, num_ranks, add);
  }
}

}  // namespace
}  // namespace tessera::testing

int main() {
#ifdef TESSERA_CPU_LEVEL
  if (!__builtin_cpu_supports(TESSERA_CPU_LEVEL)) return 77;
#endif
  tessera::testing::print_all();
  return 0;
}
