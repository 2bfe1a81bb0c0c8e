// The passes over flat shards: squared norm with finiteness, and unscale + clip + optimizer update + cast in
// one read and write. One interface; the device of the tensors picks the CPU or the CUDA implementation. All
// tensors are one-dimensional and contiguous; slices may start at any element. On the CPU torch's
// intra-op threads share the work without changing a bit. On CUDA the work goes to the current stream, many
// segments in one launch, and nothing waits for it: sums stay on the device until the caller brings them to
// the host, all at once. (first_nonfinite waits.) Scratch comes from
// torch's caching allocator. Tensors are written behind autograd's back: whoever owns the parameters bumps
// their version counters. Throws std::logic_error for tensors that do not fit together, tessera::Error when
// CUDA fails or is not built in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/kernels/hyper.h"

namespace tessera::kernels {

/// `grads`: (n) each, fp32, bf16 or fp16, on one device. `sums`: (rows, 2) fp64 there; row rows[i] becomes
/// the sum of squares of the finite elements of grads[i], and the number of the others. Summed in fp64 in an
/// order that depends on n alone: the same bits whatever the alignment of the slice or the number of threads.
void squared_norms(const std::vector<at::Tensor>& grads, const at::Tensor& sums,
                   const std::vector<int64_t>& rows);
/// Index of the first element that is inf or NaN, or -1.
int64_t first_nonfinite(const at::Tensor& grad);

/// One segment: neighbouring elements of a shard that share hyper-parameters and step count.
struct Segment {
  at::Tensor master;              ///< (n) fp32, updated
  at::Tensor grad;                ///< (n) fp32, bf16 or fp16
  std::vector<at::Tensor> state;  ///< each (n) fp32, updated; as state_names()
  at::Tensor param;  ///< (n) compute dtype, receives the cast; undefined when master is the parameter
};
/// What a segment is updated with. `step` counts from 1.
struct SegmentUpdate {
  const Hyper* hyper;  ///< outlives the call
  int64_t step;
  Segment segment;
};

/// Every optimizer but LAMB and Muon, over segments of one device that do not overlap. `grad_scale`
/// multiplies the gradient first (1 / loss scale x clip coefficient); with 1.0 the gradient's bits stay as
/// they are. The gradient must be finite. Follows torch::optim::Adam, AdamW, SGD, Adagrad; Lion is Chen et
/// al., arXiv:2302.06675, Algorithm 2.
void update(OptimizerKind kind, double grad_scale, const std::vector<SegmentUpdate>& updates);

/// LAMB (You et al., arXiv:1904.00962) needs each parameter's norms over all its shards between two
/// passes (a segment is then one parameter's part). First pass: updates the moments; row rows[i] of `sums`,
/// (rows, 2) fp64 on the segments' device, becomes the sums of squares of the weights and of the update of
/// updates[i].
void lamb_norms(double grad_scale, const std::vector<SegmentUpdate>& updates, const at::Tensor& sums,
                const std::vector<int64_t>& rows);
/// Second pass: master -= lr * trust_ratio * update. `trust_ratios[i]` comes from lamb_trust_ratio over the
/// summed parts. Does not read the gradient.
void lamb_apply(const std::vector<SegmentUpdate>& updates, const std::vector<double>& trust_ratios);

}  // namespace tessera::kernels
