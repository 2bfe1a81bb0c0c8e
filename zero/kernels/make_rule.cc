#include "zero/kernels/make_rule.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace tessera::kernels {
namespace {

/// 1 - beta^step, or 1 when the moments are taken as they are.
double correction(const Hyper& hyper, double beta, int64_t step) {
  return hyper.bias_correction ? 1.0 - std::pow(beta, static_cast<double>(step)) : 1.0;
}

Rule make_adam(const Hyper& hyper, int64_t step, bool decoupled) {
  AdamRule rule{};
  rule.beta1 = static_cast<float>(hyper.beta1);
  rule.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  rule.beta2 = static_cast<float>(hyper.beta2);
  rule.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  rule.l2 = decoupled ? 0.0f : static_cast<float>(hyper.weight_decay);
  rule.keep = decoupled ? static_cast<float>(1.0 - hyper.lr * hyper.weight_decay) : 1.0f;
  rule.eps = static_cast<float>(hyper.eps);
  rule.inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction(hyper, hyper.beta2, step)));
  rule.step_size = static_cast<float>(hyper.lr / correction(hyper, hyper.beta1, step));
  if (hyper.amsgrad)
    return AmsgradRule{
        .one_minus_beta1 = rule.one_minus_beta1,
        .beta2 = rule.beta2,
        .one_minus_beta2 = rule.one_minus_beta2,
        .l2 = rule.l2,
        .keep = rule.keep,
        .eps = rule.eps,
        .sqrt_correction2 = static_cast<float>(std::sqrt(correction(hyper, hyper.beta2, step))),
        .step_size = rule.step_size};
  return rule;
}

Rule make_sgd(const Hyper& hyper, int64_t step) {
  const auto lr = static_cast<float>(hyper.lr);
  const auto l2 = static_cast<float>(hyper.weight_decay);
  if (hyper.momentum == 0) return SgdRule{lr, l2};
  MomentumRule rule{};
  rule.lr = lr;
  rule.l2 = l2;
  rule.momentum = static_cast<float>(hyper.momentum);
  rule.carry = step == 1 ? 0.0f : rule.momentum;
  rule.take = step == 1 ? 1.0f : static_cast<float>(1.0 - hyper.dampening);
  rule.nesterov = hyper.nesterov;
  return rule;
}

AdagradRule make_adagrad(const Hyper& hyper, int64_t step) {
  AdagradRule rule{};
  rule.l2 = static_cast<float>(hyper.weight_decay);
  rule.eps = static_cast<float>(hyper.eps);
  rule.step_size = static_cast<float>(hyper.lr / (1.0 + static_cast<double>(step - 1) * hyper.lr_decay));
  return rule;
}

template <bool kCentered, bool kMomentum>
Rule make_rmsprop(const Hyper& hyper) {
  RmspropRule<kCentered, kMomentum> rule{};
  rule.lr = static_cast<float>(hyper.lr);
  rule.l2 = static_cast<float>(hyper.weight_decay);
  rule.eps = static_cast<float>(hyper.eps);
  rule.momentum = static_cast<float>(hyper.momentum);
  rule.alpha = static_cast<float>(hyper.alpha);
  rule.one_minus_alpha = static_cast<float>(1.0 - hyper.alpha);
  return rule;
}

Rule make_rmsprop(const Hyper& hyper) {
  if (hyper.centered)
    return hyper.momentum > 0 ? make_rmsprop<true, true>(hyper) : make_rmsprop<true, false>(hyper);
  return hyper.momentum > 0 ? make_rmsprop<false, true>(hyper) : make_rmsprop<false, false>(hyper);
}

LionRule make_lion(const Hyper& hyper) {
  LionRule rule{};
  rule.lr = static_cast<float>(hyper.lr);
  rule.beta1 = static_cast<float>(hyper.beta1);
  rule.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  rule.beta2 = static_cast<float>(hyper.beta2);
  rule.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  rule.keep = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  return rule;
}

}  // namespace

Rule make_rule(OptimizerKind kind, const Hyper& hyper, int64_t step) {
  TESSERA_CHECK(step >= 1, "step is ", step);
  switch (kind) {
    case OptimizerKind::kAdam: return make_adam(hyper, step, /*decoupled=*/false);
    case OptimizerKind::kAdamW: return make_adam(hyper, step, /*decoupled=*/true);
    case OptimizerKind::kSGD: return make_sgd(hyper, step);
    case OptimizerKind::kAdagrad: return make_adagrad(hyper, step);
    case OptimizerKind::kRMSprop: return make_rmsprop(hyper);
    case OptimizerKind::kLion: return make_lion(hyper);
    case OptimizerKind::kLamb:
    case OptimizerKind::kMuon:
    case OptimizerKind::kAdafactor:
    case OptimizerKind::kAdamW8bit: break;
  }
  TESSERA_CHECK(false, "LAMB, Muon and what updates whole parameters have no rule of elements");
  return SgdRule{};
}

LambRule make_lamb_rule(const Hyper& hyper, int64_t step) {
  TESSERA_CHECK(step >= 1, "step is ", step);
  LambRule rule{};
  rule.beta1 = static_cast<float>(hyper.beta1);
  rule.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  rule.beta2 = static_cast<float>(hyper.beta2);
  rule.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  rule.weight_decay = static_cast<float>(hyper.weight_decay);
  rule.eps = static_cast<float>(hyper.eps);
  rule.inv_correction1 = static_cast<float>(1.0 / correction(hyper, hyper.beta1, step));
  rule.inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction(hyper, hyper.beta2, step)));
  return rule;
}

std::vector<std::string_view> state_names(OptimizerKind kind, const Hyper& hyper) {
  switch (kind) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      if (hyper.amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
      return {"exp_avg", "exp_avg_sq"};
    case OptimizerKind::kLamb:
    case OptimizerKind::kMuon: return {"exp_avg", "exp_avg_sq"};
    case OptimizerKind::kRMSprop: {
      std::vector<std::string_view> names = {"square_avg"};
      if (hyper.centered) names.emplace_back("grad_avg");
      if (hyper.momentum > 0) names.emplace_back("momentum_buffer");
      return names;
    }
    case OptimizerKind::kSGD:
      if (hyper.momentum == 0) return {};
      return {"momentum_buffer"};
    case OptimizerKind::kAdagrad: return {"sum"};
    case OptimizerKind::kLion: return {"exp_avg"};
    case OptimizerKind::kAdafactor:
    case OptimizerKind::kAdamW8bit: return {};
  }
  return {};
}

double lamb_trust_ratio(const Hyper& hyper, const LambPart& total) {
  if (total.weight_sq == 0 || total.update_sq == 0) return 1.0;
  const double ratio = std::sqrt(total.weight_sq) / std::sqrt(total.update_sq);
  return std::max(hyper.min_coeff, std::min(hyper.max_coeff, ratio));
}

}  // namespace tessera::kernels
