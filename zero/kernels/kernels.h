// The passes over flat shards: squared norm with finiteness, and unscale + clip + optimizer update + cast in
// one read and write. One interface; the device of the tensors picks the CPU or the CUDA implementation. All
// tensors are one-dimensional and contiguous; slices may start at any element. Local. On the CPU nothing
// here allocates, and torch's intra-op threads share the work without changing a bit. On CUDA the work goes
// to the current stream; squared_norm, first_nonfinite and lamb_norms wait for their result, and their
// scratch comes from torch's caching allocator. Tensors are written behind autograd's back: whoever owns the
// parameters bumps their version counters. Throws std::logic_error for tensors that do not fit together,
// tessera::Error when CUDA fails or is not built in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "zero/kernels/hyper.h"

namespace tessera::kernels {

/// `grad`: (n) fp32, bf16 or fp16. Summed in fp64 in an order that depends on n alone: the same bits whatever
/// the alignment of the slice or the number of threads.
NormPart squared_norm(const at::Tensor& grad);
/// The same without waiting for the device.
class PendingNorm {
 public:
  PendingNorm() = default;
  explicit PendingNorm(NormPart part) : part_(part) {}
  explicit PendingNorm(at::Tensor on_device) : on_device_(std::move(on_device)) {}
  /// Waits for it.
  NormPart get() const;

 private:
  at::Tensor on_device_;  // (2) fp64: sum_of_squares, num_nonfinite; undefined: they are in part_
  NormPart part_;
};
PendingNorm begin_squared_norm(const at::Tensor& grad);
/// Index of the first element that is inf or NaN, or -1.
int64_t first_nonfinite(const at::Tensor& grad);

/// One segment: neighbouring elements of a shard that share hyper-parameters and step count.
struct Segment {
  at::Tensor master;              ///< (n) fp32, updated
  at::Tensor grad;                ///< (n) fp32, bf16 or fp16
  std::vector<at::Tensor> state;  ///< each (n) fp32, updated; as state_names()
  at::Tensor param;  ///< (n) compute dtype, receives the cast; undefined when master is the parameter
};

/// Every optimizer but LAMB. `step` counts from 1. `grad_scale` multiplies the gradient first (1 / loss scale
/// x clip coefficient); with 1.0 the gradient's bits stay as they are. The gradient must be finite. Follows
/// torch::optim::Adam, AdamW, SGD, Adagrad; Lion is Chen et al., arXiv:2302.06675, Algorithm 2.
void update(OptimizerKind kind, const Hyper& hyper, int64_t step, double grad_scale, const Segment& segment);

/// LAMB (You et al., arXiv:1904.00962) needs each parameter's norms over all its shards between two
/// passes (a segment is then one parameter's part). First pass: updates the moments, returns the sums of
/// squares of the weights and of the update.
LambPart lamb_norms(const Hyper& hyper, int64_t step, double grad_scale, const Segment& segment);
/// Second pass: master -= lr * trust_ratio * update. `trust_ratio` comes from lamb_trust_ratio over the
/// summed parts. Does not read the gradient.
void lamb_apply(const Hyper& hyper, int64_t step, double trust_ratio, const Segment& segment);

}  // namespace tessera::kernels
