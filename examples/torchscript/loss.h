// Loss functions of a model's output, by their names in torch.nn.functional.
//
// torch's mean over class numbers divides by what counts: the labels that are not ignored, or their classes'
// weights. Where samples count differently, the mean of the means of micro-steps and ranks would depend on
// how a step is cut. So each slice's loss is weighted by what counts in it (TrainOrder::weights, from
// target_weights() of the whole set): the loss and the gradient of a step are those of one batch of all its
// samples, as Hugging Face's Trainer has them with num_items_in_batch.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::examples {

enum class Loss {
  kModel,  ///< the model computes it
  kCrossEntropy,
  kNll,
  kCausalLm,
  kMse,
  kL1,
  kSmoothL1,
  kBceWithLogits,
};

/// The label of ignored elements, as in torch.nn.functional.
inline constexpr int64_t kIgnoredLabel = -100;

/// "model", "cross_entropy", "nll", "causal_lm", "mse", "l1", "smooth_l1", "bce_with_logits".
const std::vector<std::string>& loss_names();
Loss loss_of(const std::string& name);
const std::string& name_of(Loss loss);

/// Whether targets are class numbers.
constexpr bool counts_classes(Loss loss) {
  return loss == Loss::kCrossEntropy || loss == Loss::kNll || loss == Loss::kCausalLm;
}

/// Named as in torch.nn.CrossEntropyLoss and BCEWithLogitsLoss, except class_weights, which is `weight`
/// there.
struct LossOptions {
  Loss kind = Loss::kModel;
  std::vector<double> class_weights;  ///< cross_entropy, nll: by class; empty: all 1
  std::vector<double> pos_weight;     ///< bce_with_logits: by the last dimension, or one for all; empty: 1
  double label_smoothing = 0;         ///< cross_entropy
};

/// A loss function on one device. Immutable except for to(). Not for kModel.
///
/// A loss that counts class numbers takes scores (B, C, …) and targets (B, …); causal_lm takes scores (B, T,
/// C) and tokens (B, T), where the scores at t are compared with token t + 1. Other targets have their
/// output's shape.
class LossFunction {
 public:
  LossFunction() = default;
  explicit LossFunction(const LossOptions& options);
  /// Must be called once, before the first loss on another device than the CPU.
  void to(at::Device device);

  /// What is wrong with the two's shapes, or with the weights for them; or nothing.
  std::string mismatch(const at::Tensor& output, const at::Tensor& target) const;
  /// Classes the output has scores for; of a loss that counts_classes().
  int64_t num_classes(const at::Tensor& output) const;

  /// Fp32 scalar for all types: the mean over the elements that count; 0 if none does.
  at::Tensor mean(const at::Tensor& output, const at::Tensor& target) const;

  /// Scores with their labels, ignored ones included. For class numbers only.
  struct Positions {
    at::Tensor scores;  ///< (N, C, …); N is B, and B * T of causal_lm
    at::Tensor labels;  ///< (N, …) int64
  };
  Positions positions(const at::Tensor& output, const at::Tensor& target) const;
  /// {losses, weights} of each element, fp32, in the target's shape (of causal_lm: at t those of token t +
  /// 1). Ignored labels have 0 and 0. The sum of the losses by the sum of the weights is the mean.
  std::pair<at::Tensor, at::Tensor> elements(const at::Tensor& output, const at::Tensor& target) const;
  /// (B) fp64: the weight of each row of a target in a mean. For class numbers only. Rows may hold
  /// invalid classes.
  at::Tensor target_weights(const at::Tensor& target) const;

 private:
  at::Tensor compute(const at::Tensor& output, const at::Tensor& target,
                     at::Reduction::Reduction reduction) const;
  at::Tensor label_weights(const at::Tensor& labels) const;

  LossOptions options_;
  at::Tensor weights_;  // (C) or undefined
};

}  // namespace tessera::examples
