// Classification metrics as sums over samples (see Task): loss, accuracy and the confusion matrix.
#pragma once

#include <ATen/core/Tensor.h>

#include "train/task/task.h"

namespace tessera::train {

/// Logits: (B, C) floating point; target: (B) int64, below C; mask: (B) bool, or undefined for
/// all true. Returns (2 + C * C) fp64: the number of samples, the sum of their cross-entropies, and the
/// confusion matrix (rows: true classes, columns: predicted classes). Rows whose mask is false are not
/// counted, even if they hold NaN.
at::Tensor classification_statistics(const at::Tensor& logits, const at::Tensor& target,
                                     const at::Tensor& mask);

/// Total: the sum of such statistics, on the CPU. Returns the confusion matrix, (C, C) fp64.
at::Tensor confusion_matrix(const at::Tensor& total);

/// {"accuracy", "loss"} from such a sum, averaged over the samples.
Metrics classification_metrics(const at::Tensor& total);

}  // namespace tessera::train
