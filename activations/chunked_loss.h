// The cross-entropy of a large vocabulary without its logits in memory: some rows at a time. The gradients of
// the hidden states and the projection are computed in the forward, while a chunk's logits are there.
//
// After: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section 3.2.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

struct ChunkedLossOptions {
  int64_t chunk_rows = 1024;    ///< rows of logits that exist at once
  int64_t ignore_index = -100;  ///< targets of this value do not count
};

/// Collective where the projection is sharded, as any use of a parameter. The mean of
/// cross_entropy(hidden · weightᵀ + bias, target) over the targets that count, in fp32 (NaN if there are
/// none, as in libtorch). hidden: (…, dim); weight: (vocabulary, dim); bias: (vocabulary) or undefined;
/// target: (…) int64. To rounding the same as the plain loss: sums of a chunk come before the sum of the
/// chunks. Throws Error for other shapes. The result has no second derivative.
at::Tensor chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                 const at::Tensor& target, const ChunkedLossOptions& options = {});

}  // namespace tessera
