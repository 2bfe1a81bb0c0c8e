// Compiled with -ffp-contract=off (cmake/Targets.cmake): a multiplication and an addition must not become
// one operation on machines that have it.
#include "comm/shm/reduce.h"

#include <algorithm>
#include <type_traits>

#include "core/check.h"
#include "core/every_cpu.h"
#include "core/float_blocks.h"

namespace tessera::comm::shm {
namespace {

// Halves pass through a block that stays in the L1 cache.
constexpr int64_t kBlock = 1024;

TESSERA_EVERY_CPU void add_fp32(float* __restrict sum, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += in[i];
}

TESSERA_EVERY_CPU void add_two_fp32(float* sum, const float* a, const float* b, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

TESSERA_EVERY_CPU void add_bf16(float* __restrict sum, const uint16_t* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += float_of_bf16(in[i]);
}

TESSERA_EVERY_CPU void add_fp16(float* __restrict sum, const uint16_t* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += float_of_fp16(in[i]);
}

TESSERA_EVERY_CPU void scale_fp32(float* __restrict values, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] *= scale;
}

void add_floats(float* sum, const void* in, DType dtype, int64_t begin, int64_t n) {
  if (dtype == DType::kBFloat16) return add_bf16(sum, static_cast<const uint16_t*>(in) + begin, n);
  if (dtype == DType::kFloat16) return add_fp16(sum, static_cast<const uint16_t*>(in) + begin, n);
  add_fp32(sum, static_cast<const float*>(in) + begin, n);
}

void reduce_floats(const Reduction& reduction) {
  const auto& [dtype, inputs, num_inputs, numel, output] = reduction;
  alignas(64) float block[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t n = std::min(kBlock, numel - begin);
    int next = 1;
    if (dtype == DType::kFloat32 && num_inputs > 1) {
      add_two_fp32(block, static_cast<const float*>(inputs[0]) + begin,
                   static_cast<const float*>(inputs[1]) + begin, n);
      next = 2;
    } else {
      read_floats(inputs[0], dtype, begin, n, block);
    }
    for (; next < num_inputs; ++next) add_floats(block, inputs[next], dtype, begin, n);
    if (output.scale != 1) scale_fp32(block, static_cast<float>(output.scale), n);
    if (output.add) add_floats(block, output.data, output.dtype, begin, n);
    write_floats(block, n, output.data, output.dtype, begin);
  }
}

/// fp64 and integers; `T` is unsigned where overflow wraps. Integers are not scaled.
template <class T>
void reduce_as(const Reduction& reduction) {
  const auto& [dtype, inputs, num_inputs, numel, output] = reduction;
  for (int64_t i = 0; i < numel; ++i) {
    T value = static_cast<const T*>(inputs[0])[i];
    for (int input = 1; input < num_inputs; ++input)
      value = static_cast<T>(value + static_cast<const T*>(inputs[input])[i]);
    if constexpr (std::is_floating_point_v<T>) value = value * output.scale;
    T* result = static_cast<T*>(output.data) + i;
    *result = output.add ? static_cast<T>(*result + value) : value;
  }
}

void reduce_bools(const Reduction& reduction) {
  const auto& [dtype, inputs, num_inputs, numel, output] = reduction;
  for (int64_t i = 0; i < numel; ++i) {
    uint8_t* result = static_cast<uint8_t*>(output.data) + i;
    uint8_t value = output.add ? *result : 0;
    for (int input = 0; input < num_inputs; ++input)
      value = static_cast<uint8_t>(value | static_cast<const uint8_t*>(inputs[input])[i]);
    *result = value;
  }
}

}  // namespace

void reduce(const Reduction& reduction) {
  switch (reduction.dtype) {
    case DType::kFloat32:
    case DType::kBFloat16:
    case DType::kFloat16: return reduce_floats(reduction);
    case DType::kFloat64: return reduce_as<double>(reduction);
    case DType::kInt64: return reduce_as<uint64_t>(reduction);
    case DType::kInt32: return reduce_as<uint32_t>(reduction);
    case DType::kInt16: return reduce_as<uint16_t>(reduction);
    case DType::kInt8:
    case DType::kUInt8: return reduce_as<uint8_t>(reduction);
    case DType::kBool: return reduce_bools(reduction);
    default: TESSERA_CHECK(false, "no sum of ", name_of(reduction.dtype));
  }
}

}  // namespace tessera::comm::shm
