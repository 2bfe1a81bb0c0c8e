// Conversion of bf16 and fp16 from and to fp32, rounding to nearest even. The same bits on CPU and GPU as
// torch's casts. Without branches, so that loops vectorise.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TESSERA_HD __host__ __device__ inline
#else
#define TESSERA_HD inline
#endif

namespace tessera {

TESSERA_HD uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
TESSERA_HD float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

TESSERA_HD bool is_finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }

/// bf16 is the upper half of an fp32.
TESSERA_HD float float_of_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

TESSERA_HD uint16_t bf16_of_float(float x) {
  const uint32_t bits = bits_of(x);
  // Half of the last kept bit, less one when that bit is even: a tie goes to even.
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(nan ? 0x7FC0u : rounded);
}

TESSERA_HD float float_of_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFFu)
                           << 13;  // exponent and mantissa in fp32's place
  const uint32_t exponent = shifted & 0x0F800000u;
  // Normal: rebias the exponent from 15 to 127. Infinity and NaN: to 255. Subnormal: mantissa x 2^-24, exact.
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = shifted + (224u << 23);
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(half & 0x3FFu)) * 0x1p-24f);
  const uint32_t magnitude = exponent == 0x0F800000u ? special : exponent == 0 ? subnormal : normal;
  return float_of(sign | magnitude);
}

TESSERA_HD uint16_t fp16_of_float(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal: rebias, round to nearest even on bit 13; a carry into the exponent gives infinity from 65520 up.
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 leaves exactly the subnormal's bits in the mantissa, rounded by the hardware.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t result = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(sign | result);
}

}  // namespace tessera
