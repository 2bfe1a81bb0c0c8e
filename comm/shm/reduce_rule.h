// A reduction's formula for one element, once for the CPU and for CUDA: reduce.cc calls it for numbers that
// it does not sum in blocks, and comm/p2p/cuda_stream.cu for all. IEEE operations one by one
// (-ffp-contract=off, --fmad=false), so both give the same bits; NaNs differ in theirs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/float_bits.h"

namespace tessera::comm::shm {

// How fp32, bf16 and fp16 are read as fp32, and written.
struct Fp32 {
  TESSERA_HD static float load(const void* data, int64_t i) { return static_cast<const float*>(data)[i]; }
  TESSERA_HD static void store(void* data, int64_t i, float x) { static_cast<float*>(data)[i] = x; }
};
struct Bf16 {
  TESSERA_HD static float load(const void* data, int64_t i) {
    return float_of_bf16(static_cast<const uint16_t*>(data)[i]);
  }
  TESSERA_HD static void store(void* data, int64_t i, float x) {
    static_cast<uint16_t*>(data)[i] = bf16_of_float(x);
  }
};
struct Fp16 {
  TESSERA_HD static float load(const void* data, int64_t i) {
    return float_of_fp16(static_cast<const uint16_t*>(data)[i]);
  }
  TESSERA_HD static void store(void* data, int64_t i, float x) {
    static_cast<uint16_t*>(data)[i] = fp16_of_float(x);
  }
};

/// out[i] = scale * (inputs[0][i] + inputs[1][i] + …) [+ out[i]], in fp32, rounded once.
template <class In, class Out>
TESSERA_HD void reduce_float(const void* const* inputs, int num_inputs, int64_t i, void* out, float scale,
                             bool add) {
  float sum = In::load(inputs[0], i);
  for (int input = 1; input < num_inputs; ++input) sum = sum + In::load(inputs[input], i);
  if (scale != 1) sum = sum * scale;
  if (add) sum = sum + Out::load(out, i);
  Out::store(out, i, sum);
}

/// The same of fp64 and integers; `T` is unsigned where overflow wraps. Integers are not scaled.
template <class T>
TESSERA_HD void reduce_number(const void* const* inputs, int num_inputs, int64_t i, void* out, double scale,
                              bool add) {
  T value = static_cast<const T*>(inputs[0])[i];
  for (int input = 1; input < num_inputs; ++input)
    value = static_cast<T>(value + static_cast<const T*>(inputs[input])[i]);
  if constexpr (std::is_floating_point_v<T>) value = value * scale;
  T* result = static_cast<T*>(out) + i;
  *result = add ? static_cast<T>(*result + value) : value;
}

/// Bools: "or".
TESSERA_HD void reduce_bool(const void* const* inputs, int num_inputs, int64_t i, void* out, bool add) {
  uint8_t* result = static_cast<uint8_t*>(out) + i;
  uint8_t value = add ? *result : 0;
  for (int input = 0; input < num_inputs; ++input)
    value = static_cast<uint8_t>(value | static_cast<const uint8_t*>(inputs[input])[i]);
  *result = value;
}

}  // namespace tessera::comm::shm
