#include "examples/torchscript/loss.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/check.h"
#include "core/str.h"

namespace tessera::examples {

const std::vector<std::string>& loss_names() {
  static const std::vector<std::string> names{"model", "cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce_with_logits"};
  return names;
}

Loss loss_of(const std::string& name) {
  const auto& names = loss_names();
  const auto found = std::find(names.begin(), names.end(), name);
  TESSERA_CHECK(found != names.end(), name);
  return static_cast<Loss>(found - names.begin());  // the enum's order
}

const std::string& name_of(Loss loss) { return loss_names()[static_cast<size_t>(loss)]; }

std::string mismatch(Loss loss, const at::Tensor& output, const at::Tensor& target) {
  std::vector<int64_t> expected = output.sizes().vec();
  if (counts_classes(loss)) {
    if (expected.size() < 2) return str("the model gives ", describe_shape(expected), "; expected scores (B, C, …) of C classes");
    expected.erase(expected.begin() + 1);
  }
  if (target.sizes() == at::IntArrayRef(expected)) return "";
  return str("the model gives ", describe_shape(output.sizes()), ", the target is ", describe_shape(target.sizes()),
             "; expected a target of ", describe_shape(expected), counts_classes(loss) ? ", one class number for the scores along dimension 1" : "");
}

at::Tensor compute_loss(Loss loss, const at::Tensor& output, const at::Tensor& target, at::Reduction::Reduction reduction) {
  const at::Tensor given = output.to(at::kFloat);
  if (loss == Loss::kCrossEntropy) return at::cross_entropy_loss(given, target.to(at::kLong), {}, reduction, kIgnoredLabel);
  if (loss == Loss::kNll) return at::nll_loss_nd(given, target.to(at::kLong), {}, reduction, kIgnoredLabel);
  const at::Tensor wanted = target.to(at::kFloat);
  switch (loss) {
    case Loss::kMse: return at::mse_loss(given, wanted, reduction);
    case Loss::kL1: return at::l1_loss(given, wanted, reduction);
    case Loss::kSmoothL1: return at::smooth_l1_loss(given, wanted, reduction);
    case Loss::kBceWithLogits: return at::binary_cross_entropy_with_logits(given, wanted, {}, {}, reduction);
    default: TESSERA_CHECK(false, "the model's own loss"); return {};
  }
}

}  // namespace tessera::examples
