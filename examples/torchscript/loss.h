// Losses by the names torch.nn.functional has for them, of what a model gives.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

enum class Loss {
  kModel,  ///< the model computes it
  kCrossEntropy,
  kNll,
  kMse,
  kL1,
  kSmoothL1,
  kBceWithLogits,
};

/// Class numbers that say "not this one", as in torch.nn.functional.
inline constexpr int64_t kIgnoredLabel = -100;

/// Local. "model", "cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce_with_logits".
const std::vector<std::string>& loss_names();
Loss loss_of(const std::string& name);
const std::string& name_of(Loss loss);

/// Whether targets are class numbers.
constexpr bool counts_classes(Loss loss) { return loss == Loss::kCrossEntropy || loss == Loss::kNll; }

/// Local. What is wrong with the two's shapes, or nothing. Class numbers (B, …) belong to outputs (B, C, …); other targets have
/// their output's shape.
std::string mismatch(Loss loss, const at::Tensor& output, const at::Tensor& target);

/// Local. Not for kModel. fp32, whatever the types are: () for Mean and Sum, the target's shape for None, where ignored labels give 0.
at::Tensor compute_loss(Loss loss, const at::Tensor& output, const at::Tensor& target, at::Reduction::Reduction reduction);

}  // namespace tessera::examples
