// Loss and accuracy of classification, as sums (see Task).
#pragma once

#include <ATen/core/Tensor.h>

#include "train/task.h"

namespace tessera::train {

/// Local. logits: (B, C) floating point; target: (B) int64; mask: (B) bool, or undefined for all true. Returns (3) fp64:
/// samples, sum of their cross-entropies, correct ones. Rows whose mask is false add nothing, whatever is in them.
at::Tensor classification_statistics(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& mask);

/// Local. {"accuracy", "loss"}, averaged over the samples.
Metrics classification_metrics(const at::Tensor& total);

}  // namespace tessera::train
