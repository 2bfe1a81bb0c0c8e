// One step of the optimizers that torch::optim does not have, as their papers say it, in the tensors' dtype.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "zero/kernels/hyper.h"

namespace tessera::testing {

/// Chen et al., arXiv:2302.06675, Algorithm 2.
inline void lion_of_the_paper(const kernels::Hyper& hyper, at::Tensor& w, at::Tensor& m,
                              const at::Tensor& g) {
  w = w - hyper.lr * (at::sign(hyper.beta1 * m + (1 - hyper.beta1) * g) + hyper.weight_decay * w);
  m = hyper.beta2 * m + (1 - hyper.beta2) * g;
}

/// You et al., arXiv:1904.00962, Algorithm 2, with phi the identity and DeepSpeed's bounds on the trust
/// ratio. `step` counts from 1.
inline void lamb_of_the_paper(const kernels::Hyper& hyper, int64_t step, at::Tensor& w, at::Tensor& m,
                              at::Tensor& v, const at::Tensor& g) {
  m = hyper.beta1 * m + (1 - hyper.beta1) * g;
  v = hyper.beta2 * v + (1 - hyper.beta2) * g * g;
  const auto exponent = static_cast<double>(step);
  const double correction1 = hyper.bias_correction ? 1 - std::pow(hyper.beta1, exponent) : 1;
  const double correction2 = hyper.bias_correction ? 1 - std::pow(hyper.beta2, exponent) : 1;
  const at::Tensor u = m / correction1 / ((v / correction2).sqrt() + hyper.eps) + hyper.weight_decay * w;
  const double ratio = (w.norm() / u.norm()).item<double>();
  w = w - hyper.lr * std::clamp(ratio, hyper.min_coeff, hyper.max_coeff) * u;
}

}  // namespace tessera::testing
