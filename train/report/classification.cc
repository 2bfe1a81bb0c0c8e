#include "train/report/classification.h"

#include <ATen/ATen.h>

#include <cmath>

#include "core/check.h"

namespace tessera::train {

at::Tensor classification_statistics(const at::Tensor& logits, const at::Tensor& target,
                                     const at::Tensor& mask) {
  const int64_t num_classes = logits.size(1);
  const at::Tensor valid = mask.defined() ? mask : at::ones_like(target, at::kBool);
  const at::Tensor losses = at::cross_entropy_loss(logits.to(at::kFloat), target, {}, at::Reduction::None);
  const at::Tensor counted =
      at::where(valid, losses.to(at::kDouble), 0.0);  // a product would not do: 0 * inf is NaN
  const at::Tensor ones = valid.to(at::kDouble);
  const at::Tensor cells = at::zeros({num_classes * num_classes}, ones.options())
                               .index_add(0, target * num_classes + logits.argmax(1), ones);
  return at::cat({at::stack({ones.sum(), counted.sum()}), cells});
}

at::Tensor confusion_matrix(const at::Tensor& total) {
  const auto num_classes =
      static_cast<int64_t>(std::lround(std::sqrt(static_cast<double>(total.numel() - 2))));
  TESSERA_CHECK(total.numel() == 2 + num_classes * num_classes && total.scalar_type() == at::kDouble &&
                total.is_cpu());
  return total.narrow(0, 2, num_classes * num_classes).view({num_classes, num_classes});
}

Metrics classification_metrics(const at::Tensor& total) {
  const double* sums = total.const_data_ptr<double>();
  return {{"accuracy", confusion_matrix(total).trace().item<double>() / sums[0]},
          {"loss", sums[1] / sums[0]}};
}

}  // namespace tessera::train
