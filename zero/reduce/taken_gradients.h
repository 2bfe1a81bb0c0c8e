// TakenGradients: what stands in grad() of a parameter from a backward pass until the update, where its
// gradient has been taken by the engine.
//
// PyTorch's loops read and write p.grad between backward and step: they clip, look at norms, or drop a
// gradient. Here the gradients have been summed over ranks and lie in the units by then. An undefined grad()
// would say that there is none, and clip_grad_norm_() would silently do nothing. So a tensor stands there
// whose memory cannot be read or written: an operator on it is an error which says where the gradient is.
// What replaces it, or resets grad(), is an error of the next backward() or step().
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "zero/plan/layout.h"

namespace tessera::zero {

/// Puts tensors without memory into grad() of parameters whose gradient has been taken. Not thread-safe.
/// `parameters[i]` is Layout parameter i. The layout must outlive it.
class TakenGradients {
 public:
  TakenGradients(const Layout& layout, std::vector<at::Tensor> parameters);
  /// Empties what it has filled.
  ~TakenGradients();
  TakenGradients(const TakenGradients&) = delete;

  /// Fills grad() of the trainable parameters that are `used` (by parameter) and have none.
  void stand_in(const std::vector<bool>& used);
  /// Empties it again. Throws Error naming a parameter whose grad() is not what stand_in() has left.
  void leave();
  /// Grad() may be anything from now on.
  void forget();

 private:
  at::Tensor make(int parameter) const;

  const Layout& layout_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> stand_ins_;  // by parameter; undefined: it never had a gradient
  std::vector<int> filled_;            // parameters
};

}  // namespace tessera::zero
