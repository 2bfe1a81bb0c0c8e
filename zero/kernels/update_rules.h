// Each optimizer's formula for one element, once: the CPU loops (cpu.cc) and the CUDA kernels
// (cuda.cu) both call it. Scalars such as bias corrections are computed in fp64 when a rule is
// made (make_rule.h); elements are fp32, in torch::optim's order of operations. A rule is plain
// data and can be passed to a kernel by value.
//
// step(w, g, s0, s1, s2): w is the fp32 weight, g the gradient after scaling (of a maximizing optimizer its
// negative), s0 to s2 the states in state_names() order (those beyond kNumStates are not used); updates the
// states and returns the new weight.
#pragma once

#include <cmath>
#include <variant>

#include "core/float_bits.h"

namespace tessera::kernels {

/// Kingma and Ba, arXiv:1412.6980; AdamW: Loshchilov and Hutter, arXiv:1711.05101. They differ in where the
/// weight decay goes: Adam has l2 = weight_decay and keep = 1, AdamW l2 = 0 and keep = 1 - lr * weight_decay.
struct AdamRule {
  static constexpr int kNumStates = 2;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float l2, keep, eps;
  float inv_sqrt_correction2;  ///< 1 / sqrt(1 - beta2^step)
  float step_size;             ///< lr / (1 - beta1^step)

  TESSERA_HD float step(float w, float g, float& exp_avg, float& exp_avg_sq, float&) const {
    g = g + l2 * w;
    exp_avg = exp_avg * beta1 + g * one_minus_beta1;
    exp_avg_sq = exp_avg_sq * beta2 + g * g * one_minus_beta2;
    const float denominator = sqrtf(exp_avg_sq) * inv_sqrt_correction2 + eps;
    return w * keep - step_size * exp_avg / denominator;
  }
};

/// Reddi et al., "On the Convergence of Adam and Beyond" (2018): the largest mean square so far. The order of
/// operations is that of torch.optim.Adam(amsgrad=True).
struct AmsgradRule {
  static constexpr int kNumStates = 3;
  float one_minus_beta1, beta2, one_minus_beta2;
  float l2, keep, eps;
  float sqrt_correction2;  ///< sqrt(1 - beta2^step)
  float step_size;         ///< lr / (1 - beta1^step)

  TESSERA_HD float step(float w, float g, float& exp_avg, float& exp_avg_sq, float& largest) const {
    g = g + l2 * w;
    const float distance = g - exp_avg;
    exp_avg = one_minus_beta1 < 0.5f ? exp_avg + one_minus_beta1 * distance
                                     : g - distance * (1.0f - one_minus_beta1);
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * g * g;
    largest = exp_avg_sq > largest ? exp_avg_sq : largest;
    return w * keep - step_size * exp_avg / (sqrtf(largest) / sqrt_correction2 + eps);
  }
};

/// SGD without momentum.
struct SgdRule {
  static constexpr int kNumStates = 0;
  float lr, l2;

  TESSERA_HD float step(float w, float g, float&, float&, float&) const { return w - lr * (g + l2 * w); }
};

/// The first step takes the gradient itself as the buffer, without dampening,
/// as torch does: carry = 0, take = 1.
struct MomentumRule {
  static constexpr int kNumStates = 1;
  float lr, l2, momentum;
  float carry, take;  ///< buffer = carry * buffer + take * g
  bool nesterov;

  TESSERA_HD float step(float w, float g, float& buffer, float&, float&) const {
    g = g + l2 * w;
    buffer = buffer * carry + g * take;
    const float direction = nesterov ? g + momentum * buffer : buffer;
    return w - lr * direction;
  }
};

/// Duchi et al., JMLR 12 (2011).
struct AdagradRule {
  static constexpr int kNumStates = 1;
  float l2, eps;
  float step_size;  ///< lr / (1 + (step - 1) * lr_decay)

  TESSERA_HD float step(float w, float g, float& sum, float&, float&) const {
    g = g + l2 * w;
    sum = sum + g * g;
    return w - step_size * g / (sqrtf(sum) + eps);
  }
};

/// Tieleman and Hinton, Coursera lecture 6.5 (2012); centered: Graves, arXiv:1308.0850. The order of
/// operations is that of torch.optim.RMSprop.
template <bool kCentered, bool kMomentum>
struct RmspropRule {
  static constexpr int kNumStates = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);
  float lr, l2, eps, momentum;
  float alpha, one_minus_alpha;

  TESSERA_HD float step(float w, float g, float& square_avg, float& second, float& third) const {
    g = g + l2 * w;
    square_avg = square_avg * alpha + one_minus_alpha * g * g;
    float variance = square_avg;
    if constexpr (kCentered) {
      const float distance = g - second;
      second = one_minus_alpha < 0.5f ? second + one_minus_alpha * distance
                                      : g - distance * (1.0f - one_minus_alpha);
      variance = square_avg - second * second;
    }
    const float deviation = sqrtf(variance) + eps;
    if constexpr (!kMomentum) return w - lr * g / deviation;
    float& buffer = kCentered ? third : second;
    buffer = buffer * momentum + g / deviation;
    return w - lr * buffer;
  }
};

struct LionRule {
  static constexpr int kNumStates = 1;
  float lr, beta1, one_minus_beta1, beta2, one_minus_beta2;
  float keep;  ///< 1 - lr * weight_decay

  TESSERA_HD float step(float w, float g, float& exp_avg, float&, float&) const {
    const float mixed = exp_avg * beta1 + g * one_minus_beta1;
    const float sign = static_cast<float>(mixed > 0.0f) - static_cast<float>(mixed < 0.0f);
    exp_avg = exp_avg * beta2 + g * one_minus_beta2;
    return w * keep - lr * sign;
  }
};

using Rule =
    std::variant<AdamRule, AmsgradRule, SgdRule, MomentumRule, AdagradRule, RmspropRule<false, false>,
                 RmspropRule<false, true>, RmspropRule<true, false>, RmspropRule<true, true>, LionRule>;

/// LAMB in its two halves. Bias correction divides the moments, as in the paper
/// (so it does not touch the decay).
struct LambRule {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float weight_decay, eps;
  float inv_correction1;       ///< 1 / (1 - beta1^step)
  float inv_sqrt_correction2;  ///< 1 / sqrt(1 - beta2^step)

  TESSERA_HD void advance(float g, float& exp_avg, float& exp_avg_sq) const {
    exp_avg = exp_avg * beta1 + g * one_minus_beta1;
    exp_avg_sq = exp_avg_sq * beta2 + g * g * one_minus_beta2;
  }

  TESSERA_HD float direction(float w, float exp_avg, float exp_avg_sq) const {
    return exp_avg * inv_correction1 / (sqrtf(exp_avg_sq) * inv_sqrt_correction2 + eps) + weight_decay * w;
  }
};

}  // namespace tessera::kernels
