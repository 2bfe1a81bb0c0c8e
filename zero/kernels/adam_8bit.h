// AdamW whose moments are kept in 8 bits: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
// arXiv:2110.02861, as in bitsandbytes' AdamW8bit.
//
// A moment is an array of codes, one byte an element, and the largest magnitude of each block of 256
// elements. A code stands for a fraction of that magnitude: 256 values, denser around 0 ("dynamic tree",
// section 2 of the paper). Blocks are counted from a parameter's first element, so what an update computes
// depends on the parameter alone. The update itself is AdamRule's, in fp32, by the moments before they are
// rounded to codes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "zero/kernels/adam_8bit_block.h"
#include "zero/kernels/hyper.h"

namespace tessera::kernels {

/// A moment of a parameter of n elements.
struct Moment8bit {
  at::Tensor codes;   ///< (n) uint8
  at::Tensor absmax;  ///< (n / 256, rounded up) fp32
};

/// The fractions that the codes stand for, ascending. Of the first moment, which has a sign, and the second.
std::span<const float, 256> code_values(bool is_signed);

/// The table that they, and what finds the code of a value, are in.
const Codebook& codebook(bool is_signed);

/// The code of 0.
uint8_t code_of_zero(bool is_signed);

/// One update of a whole parameter. `weights`: (n) fp32; `gradient`: (n) fp32, finite. Both moments, on the
/// same device (the CPU or CUDA), are updated. `step` counts from 1. Torch's threads share the blocks without
/// changing a bit. On CUDA a warp has a block, and the bits are the CPU's. Throws what kernels::cuda does.
void adam_8bit(const at::Tensor& weights, const at::Tensor& gradient, const Moment8bit& first,
               const Moment8bit& second, const Hyper& hyper, int64_t step);

}  // namespace tessera::kernels
