// Classification as sums (see Task): loss, accuracy, and the confusion matrix from which all else follows.
#pragma once

#include <ATen/core/Tensor.h>

#include "train/task.h"

namespace tessera::train {

/// Local. logits: (B, C) floating point; target: (B) int64, below C; mask: (B) bool, or undefined for
/// all true. Returns (2 + C * C) fp64: samples, sum of their cross-entropies, and the confusion
/// matrix: how many samples of a class (its row) were taken for which (the column). Rows whose mask is
/// false add nothing, whatever is in them.
at::Tensor classification_statistics(const at::Tensor& logits, const at::Tensor& target,
                                     const at::Tensor& mask);

/// Local. From a sum of such statistics, on the CPU: the confusion matrix, (C, C) fp64.
at::Tensor confusion_matrix(const at::Tensor& total);

/// Local. {"accuracy", "loss"}, averaged over the samples.
Metrics classification_metrics(const at::Tensor& total);

}  // namespace tessera::train
