#include "zero/optimizer/muon.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/norm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>

#include "zero/optimizer/whole_formula.h"

namespace tessera::zero {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;  // of the quintic iteration: Jordan's post
constexpr double kEps = 1e-7;

struct Matrices {
  int64_t count, rows, columns;
};

Matrices matrices_of(at::IntArrayRef shape) {
  if (shape.size() == 3) return {shape[0], shape[1], shape[2]};
  return {1, shape[0], c10::multiply_integers(shape.slice(1))};
}

/// `matrix`: (rows, columns) bf16. Returns the same.
at::Tensor orthogonalize_matrix(const at::Tensor& matrix, int64_t num_iterations) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.clone().t() : matrix.clone();
  x.div_(x.norm().clamp(kEps));
  for (int64_t i = 0; i < num_iterations; ++i) {
    const at::Tensor gram = at::matmul(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, kB, kC), x, kA);
  }
  return tall ? x.t() : x;
}

}  // namespace

bool is_muon_matrix(const ParameterSpec& parameter) {
  return parameter.shape.size() >= 2 && !is_embedding(parameter) && !has_in_name(parameter, {"lm_head"});
}

int64_t orthogonalization_cost(const ParameterSpec& parameter) {
  const Matrices of = matrices_of(parameter.shape);
  const int64_t small = std::min(of.rows, of.columns), large = std::max(of.rows, of.columns);
  return of.count * small * small * (4 * large + 2 * small);
}

double muon_rate_factor(kernels::AdjustLr adjust, const ParameterSpec& parameter) {
  const Matrices of = matrices_of(parameter.shape);
  const auto rows = static_cast<double>(of.rows), columns = static_cast<double>(of.columns);
  switch (adjust) {
    case kernels::AdjustLr::kOriginal: return std::sqrt(std::max(1.0, rows / columns));
    case kernels::AdjustLr::kMatchRmsAdamW: return 0.2 * std::sqrt(std::max(rows, columns));
    case kernels::AdjustLr::kSpectralUnclamped: return std::sqrt(rows / columns);
  }
  return 1;
}

at::Tensor orthogonalize(const at::Tensor& proposed, int64_t num_iterations) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);  // a caller's, around step()
  const Matrices of = matrices_of(proposed.sizes());
  if (proposed.numel() == 0) return proposed;
  const at::Tensor matrices = proposed.reshape({of.count, of.rows, of.columns});
  const at::Tensor result = at::empty_like(matrices);
  for (int64_t i = 0; i < of.count; ++i) result[i].copy_(orthogonalize_matrix(matrices[i], num_iterations));
  return result.view(proposed.sizes());
}

}  // namespace tessera::zero
