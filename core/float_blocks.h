// Blocks of fp32, bf16 or fp16 to and from fp32, for passes over data in blocks that stay in the L1 cache.
// Each file that includes this compiles the loops with its own options, so that they are vectorised there.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/every_cpu.h"
#include "core/float_bits.h"

namespace tessera {

[[maybe_unused]] TESSERA_EVERY_CPU static void read_bf16(const uint16_t* __restrict in, int64_t n,
                                                         float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_of_bf16(in[i]);
}

[[maybe_unused]] TESSERA_EVERY_CPU static void read_fp16(const uint16_t* __restrict in, int64_t n,
                                                         float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_of_fp16(in[i]);
}

[[maybe_unused]] TESSERA_EVERY_CPU static void write_bf16(const float* __restrict in, int64_t n,
                                                          uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_of_float(in[i]);
}

[[maybe_unused]] TESSERA_EVERY_CPU static void write_fp16(const float* __restrict in, int64_t n,
                                                          uint16_t* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = fp16_of_float(in[i]);
}

/// Reads elements [begin, begin + n) of `data`, which is of one of the three types.
[[maybe_unused]] static void read_floats(const void* data, DType dtype, int64_t begin, int64_t n,
                                         float* out) {
  if (dtype == DType::kBFloat16) return read_bf16(static_cast<const uint16_t*>(data) + begin, n, out);
  if (dtype == DType::kFloat16) return read_fp16(static_cast<const uint16_t*>(data) + begin, n, out);
  std::memcpy(out, static_cast<const float*>(data) + begin, static_cast<size_t>(n) * sizeof(float));
}

/// Writes them.
[[maybe_unused]] static void write_floats(const float* in, int64_t n, void* data, DType dtype,
                                          int64_t begin) {
  if (dtype == DType::kBFloat16) return write_bf16(in, n, static_cast<uint16_t*>(data) + begin);
  if (dtype == DType::kFloat16) return write_fp16(in, n, static_cast<uint16_t*>(data) + begin);
  std::memcpy(static_cast<float*>(data) + begin, in, static_cast<size_t>(n) * sizeof(float));
}

}  // namespace tessera
