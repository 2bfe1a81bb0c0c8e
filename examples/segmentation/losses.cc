#include "examples/segmentation/losses.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/check.h"

namespace tessera::examples {
namespace {

constexpr double kSmoothing = 1e-6;

/// (…, N) fp32 twice -> (…): the Dice coefficients over the last dimension.
at::Tensor dice(const at::Tensor& a, const at::Tensor& b) {
  return ((a * b).sum(-1).mul(2) + kSmoothing) / (a.sum(-1) + b.sum(-1) + kSmoothing);
}

/// (B, H, W) int64 -> (B, C, H, W) fp32
at::Tensor one_hot_planes(const at::Tensor& classes, int64_t num_classes) {
  return at::one_hot(classes, num_classes).permute({0, 3, 1, 2}).to(at::kFloat);
}

/// The two parts of every image's loss: mean cross-entropy (B), and what Dice is computed from,
/// probabilities and targets, each (B, C * H * W).
struct Parts {
  at::Tensor cross_entropy, probabilities, targets;
};

Parts parts_of(const at::Tensor& any_logits, const at::Tensor& target) {
  const at::Tensor logits = any_logits.to(at::kFloat);
  const int64_t num_classes = logits.size(1);
  if (num_classes == 1) {
    const at::Tensor truth = target.to(at::kFloat).unsqueeze(1);
    const at::Tensor losses =
        at::binary_cross_entropy_with_logits(logits, truth, {}, {}, at::Reduction::None);
    return {losses.flatten(1).mean(1), logits.sigmoid().flatten(1), truth.flatten(1)};
  }
  const at::Tensor losses = at::cross_entropy_loss(logits, target, {}, at::Reduction::None);  // (B, H, W)
  return {losses.flatten(1).mean(1), logits.softmax(1).flatten(1),
          one_hot_planes(target, num_classes).flatten(1)};
}

}  // namespace

at::Tensor segmentation_loss(const at::Tensor& logits, const at::Tensor& target) {
  const Parts parts = parts_of(logits, target);
  return parts.cross_entropy.mean() + (1 - dice(parts.probabilities.flatten(), parts.targets.flatten()));
}

at::Tensor predicted_mask(const at::Tensor& logits) {
  return logits.size(1) == 1 ? logits.squeeze(1).gt(0).to(at::kLong)
                             : logits.argmax(1);  // sigmoid(x) > 0.5 is x > 0
}

at::Tensor dice_of_images(const at::Tensor& prediction, const at::Tensor& target, int64_t num_classes) {
  const int64_t classes = std::max<int64_t>(num_classes, 2);
  const auto foreground = [&](const at::Tensor& mask) {
    return one_hot_planes(mask, classes).narrow(1, 1, classes - 1).flatten(2);
  };
  return dice(foreground(prediction), foreground(target)).mean(1);
}

at::Tensor segmentation_statistics(const at::Tensor& logits, const at::Tensor& target,
                                   const at::Tensor& mask) {
  const at::Tensor valid =
      mask.defined() ? mask : at::ones({target.size(0)}, target.options().dtype(at::kBool));
  const Parts parts = parts_of(logits, target);
  const at::Tensor losses = parts.cross_entropy + (1 - dice(parts.probabilities, parts.targets));
  const at::Tensor dices = dice_of_images(predicted_mask(logits), target, logits.size(1));
  const auto sum = [&](const at::Tensor& values) {
    return at::where(valid, values.to(at::kDouble), 0.0).sum();
  };  // 0 * inf is not 0
  return at::stack({valid.sum().to(at::kDouble), sum(dices), sum(losses)});
}

train::Metrics segmentation_metrics(const at::Tensor& total) {
  TESSERA_CHECK(total.numel() == 3 && total.scalar_type() == at::kDouble && total.is_cpu());
  const double* sums = total.const_data_ptr<double>();
  return {{"dice", sums[1] / sums[0]}, {"loss", sums[2] / sums[0]}};
}

}  // namespace tessera::examples
