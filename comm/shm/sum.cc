// Compiled with -ffp-contract=off (cmake/Targets.cmake): a multiplication and an addition must not become
// one operation on machines that have it.
#include "comm/shm/sum.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "core/every_cpu.h"
#include "core/float_bits.h"

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

TESSERA_EVERY_CPU void read_bf16(float* __restrict out, const uint16_t* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_of_bf16(in[i]);
}

TESSERA_EVERY_CPU void read_fp16(float* __restrict out, const uint16_t* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_of_fp16(in[i]);
}

TESSERA_EVERY_CPU void scale_fp32(float* __restrict values, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] *= scale;
}

TESSERA_EVERY_CPU void write_fp32(float* __restrict out, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

TESSERA_EVERY_CPU void write_bf16(uint16_t* __restrict out, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_of_float(in[i]);
}

TESSERA_EVERY_CPU void write_fp16(uint16_t* __restrict out, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = fp16_of_float(in[i]);
}

void read_floats(float* out, const void* in, Element element, int64_t begin, int64_t n) {
  if (element == Element::kBFloat16) return read_bf16(out, static_cast<const uint16_t*>(in) + begin, n);
  if (element == Element::kFloat16) return read_fp16(out, static_cast<const uint16_t*>(in) + begin, n);
  write_fp32(out, static_cast<const float*>(in) + begin, n);
}

void add_floats(float* sum, const void* in, Element element, int64_t begin, int64_t n) {
  if (element == Element::kBFloat16) return add_bf16(sum, static_cast<const uint16_t*>(in) + begin, n);
  if (element == Element::kFloat16) return add_fp16(sum, static_cast<const uint16_t*>(in) + begin, n);
  add_fp32(sum, static_cast<const float*>(in) + begin, n);
}

void write_floats(void* out, Element element, const float* in, int64_t begin, int64_t n) {
  if (element == Element::kBFloat16) return write_bf16(static_cast<uint16_t*>(out) + begin, in, n);
  if (element == Element::kFloat16) return write_fp16(static_cast<uint16_t*>(out) + begin, in, n);
  write_fp32(static_cast<float*>(out) + begin, in, n);
}

void sum_floats(const Sum& sum) {
  alignas(64) float block[kBlock];
  for (int64_t begin = 0; begin < sum.numel; begin += kBlock) {
    const int64_t n = std::min(kBlock, sum.numel - begin);
    int next = 1;
    if (sum.element == Element::kFloat32 && sum.num_inputs > 1) {
      add_two_fp32(block, static_cast<const float*>(sum.inputs[0]) + begin,
                   static_cast<const float*>(sum.inputs[1]) + begin, n);
      next = 2;
    } else {
      read_floats(block, sum.inputs[0], sum.element, begin, n);
    }
    for (; next < sum.num_inputs; ++next) add_floats(block, sum.inputs[next], sum.element, begin, n);
    if (sum.scale != 1) scale_fp32(block, static_cast<float>(sum.scale), n);
    if (sum.add) add_floats(block, sum.output, sum.output_element, begin, n);
    write_floats(sum.output, sum.output_element, block, begin, n);
  }
}

/// Of fp64 and integers; `Word` is unsigned where overflow wraps.
template <class Word>
void sum_words(const Sum& sum) {
  auto* out = static_cast<Word*>(sum.output);
  for (int64_t i = 0; i < sum.numel; ++i) {
    Word value = static_cast<const Word*>(sum.inputs[0])[i];
    for (int input = 1; input < sum.num_inputs; ++input)
      value = static_cast<Word>(value + static_cast<const Word*>(sum.inputs[input])[i]);
    if constexpr (std::is_floating_point_v<Word>) value *= sum.scale;
    out[i] = sum.add ? static_cast<Word>(out[i] + value) : value;
  }
}

void any_of(const Sum& sum) {
  auto* out = static_cast<uint8_t*>(sum.output);
  for (int64_t i = 0; i < sum.numel; ++i) {
    uint8_t value = sum.add ? out[i] : 0;
    for (int input = 0; input < sum.num_inputs; ++input)
      value |= static_cast<const uint8_t*>(sum.inputs[input])[i];
    out[i] = value;
  }
}

}  // namespace

int64_t size_of(Element element) {
  switch (element) {
    case Element::kFloat64:
    case Element::kInt64: return 8;
    case Element::kFloat32:
    case Element::kInt32: return 4;
    case Element::kBFloat16:
    case Element::kFloat16: return 2;
    case Element::kInt8:
    case Element::kUInt8:
    case Element::kBool: return 1;
  }
  return 1;
}

void add_up(const Sum& sum) {
  switch (sum.element) {
    case Element::kFloat32:
    case Element::kBFloat16:
    case Element::kFloat16: return sum_floats(sum);
    case Element::kFloat64: return sum_words<double>(sum);
    case Element::kInt64: return sum_words<uint64_t>(sum);
    case Element::kInt32: return sum_words<uint32_t>(sum);
    case Element::kInt8:
    case Element::kUInt8: return sum_words<uint8_t>(sum);
    case Element::kBool: return any_of(sum);
  }
}

}  // namespace tessera::comm::shm
