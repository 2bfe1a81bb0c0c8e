// An optimizer as a plug-in: RMSprop, as torch.optim.RMSprop and Tessera's own "RMSprop" compute it
// (Tieleman and Hinton, lecture 6.5 of "Neural Networks for Machine Learning", 2012).
#pragma once

#include <ATen/ops/sqrt.h>
#include <tessera/zero/optimizer/update_rule.h>

#include <string>
#include <vector>

struct RMSprop final : tessera::zero::UpdateRule {
  double alpha = 0.99, eps = 1e-8;

  std::string name() const override { return "RMSprop"; }
  std::vector<std::string> state_names() const override { return {"square_avg"}; }
  void update(const Elements& elements, const Step& step) const override {
    at::Tensor weights = elements.weights, gradient = elements.gradient, square_avg = elements.states[0];
    if (step.weight_decay != 0) gradient.add_(weights, step.weight_decay);
    square_avg.mul_(alpha).addcmul_(gradient, gradient, 1 - alpha);
    weights.addcdiv_(gradient, at::sqrt(square_avg).add_(eps), -step.lr);
  }
};
