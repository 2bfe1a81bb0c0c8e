#include "train/classification.h"

#include <ATen/ATen.h>

#include "core/check.h"

namespace tessera::train {

at::Tensor classification_statistics(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& mask) {
  const at::Tensor valid = mask.defined() ? mask : at::ones_like(target, at::kBool);
  const at::Tensor losses = at::cross_entropy_loss(logits.to(at::kFloat), target, {}, at::Reduction::None);
  const at::Tensor correct = logits.argmax(1).eq(target).logical_and(valid);
  const at::Tensor counted = at::where(valid, losses.to(at::kDouble), 0.0);  // not a product: 0 * inf is not 0
  return at::stack({valid.sum().to(at::kDouble), counted.sum(), correct.sum().to(at::kDouble)});
}

Metrics classification_metrics(const at::Tensor& total) {
  TESSERA_CHECK(total.numel() == 3 && total.scalar_type() == at::kDouble && total.is_cpu());
  const double* sums = total.const_data_ptr<double>();
  return {{"accuracy", sums[2] / sums[0]}, {"loss", sums[1] / sums[0]}};
}

}  // namespace tessera::train
