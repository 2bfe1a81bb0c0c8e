// A block of AdamW's 8-bit moments (adam_8bit.h) on raw pointers: what the loops of the CPU and the kernel of
// CUDA share. No libtorch here, as in passes.h.
#pragma once

#include <cstdint>

#include "core/float_bits.h"
#include "zero/kernels/update_rules.h"

namespace tessera::kernels {

inline constexpr int64_t kBlockNumel8bit = 256;

/// Blocks of a parameter of `numel` elements; the last may be shorter.
TESSERA_HD int64_t num_blocks_8bit(int64_t numel) { return (numel + kBlockNumel8bit - 1) / kBlockNumel8bit; }

/// The fractions that codes stand for, and where a magnitude from 0 to 1 lies among the codes of its sign:
/// below threshold 0 it is 0, above the last one 1, and between thresholds j and j + 1 in decade j, whose
/// values are the middles of equal parts. So the nearest code is found by arithmetic: it is factor *
/// magnitude
/// + offset, rounded down, from least to most.
struct Codebook {
  static constexpr int kThresholds = 8;
  float values[256];         ///< ascending
  int32_t zero;              ///< the code of 0
  float above[kThresholds];  ///< halfway between the values on both sides
  float factor[kThresholds];
  float offset[kThresholds];
  float least[kThresholds];
  float most[kThresholds];
};

/// Moments are at most this: the square of a gradient may be inf, whose fraction of a block would be NaN.
inline constexpr float kMostMagnitude8bit = 8e37F;
/// Moments whose largest magnitude is smaller have the code of 0: 1 / a subnormal number is not finite.
inline constexpr float kLeastMagnitude8bit = 1e-37F;

/// The code of a value, where `scale` is 1 / the largest magnitude of its block.
TESSERA_HD uint8_t code_of(float value, float scale, const Codebook& book) {
  const float magnitude = (value < 0 ? -value : value) * scale;
  int decade = -1;
  for (int j = 0; j < Codebook::kThresholds; ++j) decade += magnitude > book.above[j] ? 1 : 0;
  if (decade < 0) return static_cast<uint8_t>(book.zero);
  float code = magnitude * book.factor[decade] + book.offset[decade];
  code = code < book.least[decade] ? book.least[decade] : code;
  code = code > book.most[decade] ? book.most[decade] : code;
  const auto positive = static_cast<int32_t>(code);                      // rounded down
  const int32_t negative = positive > book.zero ? book.zero : positive;  // there is no -1
  return static_cast<uint8_t>(value < 0 ? book.zero - negative : book.zero + positive);
}

/// A parameter of `numel` elements, or a block of one; borrowed.
struct Adam8bitArgs {
  int64_t numel = 0;
  float* weights = nullptr;
  const float* gradient = nullptr;
  uint8_t* codes1 = nullptr;
  uint8_t* codes2 = nullptr;
  float* absmax1 = nullptr;
  float* absmax2 = nullptr;
};

}  // namespace tessera::kernels
