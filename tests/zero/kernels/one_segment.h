// The passes over one segment or gradient. Sums are waited for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

#include "zero/kernels/kernels.h"

namespace tessera::kernels {

inline NormPart squared_norm(const at::Tensor& grad) {
  const at::Tensor sums = at::empty({1, 2}, grad.options().dtype(at::kDouble));
  squared_norms({grad}, sums, {0});
  return {sums[0][0].item<double>(), static_cast<int64_t>(sums[0][1].item<double>())};
}

inline void update(OptimizerKind kind, const Hyper& hyper, int64_t step, double grad_scale,
                   const Segment& segment) {
  update(kind, grad_scale, {{&hyper, step, segment}});
}

inline LambPart lamb_norms(const Hyper& hyper, int64_t step, double grad_scale, const Segment& segment) {
  const at::Tensor sums = at::empty({1, 2}, segment.master.options().dtype(at::kDouble));
  lamb_norms(grad_scale, {{&hyper, step, segment}}, sums, {0});
  return {sums[0][0].item<double>(), sums[0][1].item<double>()};
}

inline void lamb_apply(const Hyper& hyper, int64_t step, double trust_ratio, const Segment& segment) {
  lamb_apply({{&hyper, step, segment}}, {trust_ratio});
}

}  // namespace tessera::kernels
