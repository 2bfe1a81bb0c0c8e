// Loss and Dice coefficient of segmentation, with the definitions of milesial/Pytorch-UNet.
//
// Which Dice.
// The Dice coefficient of two sets is 2 |A and B| / (|A| + |B|), here (2 |A and B| + e) / (|A| + |B| + e)
// with e = 1e-6, so it is 1 if both are empty. It is used in two ways:
// - In the loss, 1 - Dice of probabilities and one-hot targets, with all samples, classes and pixels of a
//   micro-batch as one set, so that a small object in one image does not outweigh a large one in another.
// - As a metric, of the predicted masks: for every image the mean over the classes except the
//   background, then the mean over the images. Each image counts once, so the result does not depend on
//   batches or ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "train/task/task.h"

namespace tessera::examples {

/// Logits: (B, C, H, W) floating point; target: (B, H, W) int64, below max(C, 2). Returns
/// () fp32: cross-entropy plus Dice loss; with C = 1, binary cross-entropy of a sigmoid.
/// Computed in fp32 for any type of logits.
at::Tensor segmentation_loss(const at::Tensor& logits, const at::Tensor& target);

/// (B, C, H, W) logits -> (B, H, W) int64 classes.
at::Tensor predicted_mask(const at::Tensor& logits);

/// (B, H, W) int64 twice -> (B) fp32: each image's Dice, the mean over classes 1 .. num_classes - 1.
at::Tensor dice_of_images(const at::Tensor& prediction, const at::Tensor& target, int64_t num_classes);

/// Shapes as above; mask: (B) bool, or undefined for all true. Returns (3) fp64: samples, sum
/// of their Dice, sum of their losses (segmentation_loss of each image alone). Rows whose mask is
/// false are not counted, even if they hold NaN.
at::Tensor segmentation_statistics(const at::Tensor& logits, const at::Tensor& target,
                                   const at::Tensor& mask);

/// {"dice", "loss"}, averaged over the samples.
train::Metrics segmentation_metrics(const at::Tensor& total);

}  // namespace tessera::examples
