#include "examples/torchscript/loss.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/check.h"
#include "core/str.h"

namespace tessera::examples {

const std::vector<std::string>& loss_names() {
  static const std::vector<std::string> names{"model",     "cross_entropy",  "nll", "causal_lm", "mse", "l1",
                                              "smooth_l1", "bce_with_logits"};
  return names;
}

Loss loss_of(const std::string& name) {
  const auto& names = loss_names();
  const auto found = std::find(names.begin(), names.end(), name);
  TESSERA_CHECK(found != names.end(), name);
  return static_cast<Loss>(found - names.begin());  // the enum's order
}

const std::string& name_of(Loss loss) { return loss_names()[static_cast<size_t>(loss)]; }

LossFunction::LossFunction(const LossOptions& options) : options_(options) {
  const std::vector<double>& weights =
      counts_classes(options.kind) ? options.class_weights : options.pos_weight;
  if (!weights.empty()) weights_ = at::tensor(weights, at::kFloat);
}

void LossFunction::to(at::Device device) {
  if (weights_.defined()) weights_ = weights_.to(device);
}

int64_t LossFunction::num_classes(const at::Tensor& output) const {
  return options_.kind == Loss::kCausalLm ? output.size(-1) : output.size(1);
}

std::string LossFunction::mismatch(const at::Tensor& output, const at::Tensor& target) const {
  std::vector<int64_t> expected = output.sizes().vec();
  const char* why = "";
  if (options_.kind == Loss::kCausalLm) {
    if (expected.size() != 3)
      return str("the model gives ", describe_shape(expected), "; expected scores (B, T, C) of C tokens");
    expected.pop_back();
    why = ", the tokens whose scores are along the last dimension";
    if (expected.back() < 2)
      return str("the model gives ", describe_shape(output.sizes()),
                 "; expected at least two tokens, of which the second is to be foretold");
  } else if (counts_classes(options_.kind)) {
    if (expected.size() < 2)
      return str("the model gives ", describe_shape(expected), "; expected scores (B, C, …) of C classes");
    expected.erase(expected.begin() + 1);
    why = ", one class number for the scores along dimension 1";
  }
  if (target.sizes() != at::IntArrayRef(expected))
    return str("the model gives ", describe_shape(output.sizes()), ", the target is ",
               describe_shape(target.sizes()), "; expected a target of ", describe_shape(expected), why);
  if (!weights_.defined()) return "";
  const int64_t count = weights_.size(0);
  if (counts_classes(options_.kind) && count != num_classes(output))
    return str("model.class_weights has ", count, " numbers, and the model gives ", num_classes(output),
               " classes; expected one for each class");
  if (!counts_classes(options_.kind) && count != 1 && (output.dim() == 0 || count != output.size(-1)))
    return str("model.pos_weight has ", count, " numbers, and the model gives ",
               describe_shape(output.sizes()),
               "; expected one, or one for each label along the last dimension");
  return "";
}

LossFunction::Positions LossFunction::positions(const at::Tensor& output, const at::Tensor& target) const {
  const at::Tensor labels = target.to(at::kLong);
  if (options_.kind != Loss::kCausalLm) return {output, labels};
  // Shifts the labels instead of slicing the scores, which would copy them. The last position has no label.
  const at::Tensor next = at::constant_pad_nd(labels.narrow(1, 1, labels.size(1) - 1), {0, 1}, kIgnoredLabel);
  return {output.flatten(0, 1), next.flatten()};
}

at::Tensor LossFunction::compute(const at::Tensor& output, const at::Tensor& target,
                                 at::Reduction::Reduction reduction) const {
  const at::Tensor given = output.to(at::kFloat);
  if (counts_classes(options_.kind)) {
    const auto [scores, labels] = positions(given, target);
    if (options_.kind == Loss::kNll)
      return at::nll_loss_nd(scores, labels, weights_, reduction, kIgnoredLabel);
    return at::cross_entropy_loss(scores, labels, weights_, reduction, kIgnoredLabel,
                                  options_.label_smoothing);
  }
  const at::Tensor wanted = target.to(at::kFloat);
  switch (options_.kind) {
    case Loss::kMse: return at::mse_loss(given, wanted, reduction);
    case Loss::kL1: return at::l1_loss(given, wanted, reduction);
    case Loss::kSmoothL1: return at::smooth_l1_loss(given, wanted, reduction);
    case Loss::kBceWithLogits:
      return at::binary_cross_entropy_with_logits(given, wanted, {}, weights_, reduction);
    default: TESSERA_CHECK(false, "the model's own loss"); return {};
  }
}

/// The labels' weights, in their shape, fp32: 0 for ignored ones. An invalid class gets the nearest one's
/// weight; check_labels() reports it.
at::Tensor LossFunction::label_weights(const at::Tensor& labels) const {
  const at::Tensor counted = labels.ne(kIgnoredLabel);
  if (!weights_.defined()) return counted.to(at::kFloat);
  const at::Tensor of_class =
      weights_.index_select(0, labels.clamp(0, weights_.size(0) - 1).flatten()).view_as(labels);
  return at::where(counted, of_class, 0.0);
}

/// torch divides by the sum of the weights, which gives NaN (also in gradients) if it is 0. That can happen
/// in a slice of a step.
at::Tensor LossFunction::mean(const at::Tensor& output, const at::Tensor& target) const {
  if (!counts_classes(options_.kind)) return compute(output, target, at::Reduction::Mean);
  const at::Tensor weight = label_weights(positions(output.detach(), target).labels).sum();
  return compute(output, target, at::Reduction::Sum) / at::where(weight.gt(0), weight, 1.0);
}

std::pair<at::Tensor, at::Tensor> LossFunction::elements(const at::Tensor& output,
                                                         const at::Tensor& target) const {
  const at::Tensor losses = compute(output, target, at::Reduction::None);
  if (!counts_classes(options_.kind)) return {losses, at::ones_like(losses)};
  const at::Tensor weights = label_weights(positions(output, target).labels);
  return {losses.view(target.sizes()), weights.view(target.sizes())};
}

at::Tensor LossFunction::target_weights(const at::Tensor& target) const {
  const at::Tensor labels = target.to(at::kLong);
  const at::Tensor weights =
      label_weights(options_.kind == Loss::kCausalLm ? labels.narrow(1, 1, labels.size(1) - 1) : labels);
  return weights.reshape({target.size(0), -1}).sum(1, /*keepdim=*/false, at::kDouble);
}

}  // namespace tessera::examples
