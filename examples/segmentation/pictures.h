// Images, masks and predictions side by side, for people to look at.
#pragma once

#include <ATen/core/Tensor.h>

#include "examples/segmentation/image_file.h"

namespace tessera::examples {

/// Images: (B, 3, H, W) uint8; masks, predictions: (B, H, W) int64 classes; all on the CPU. Returns an
/// RGB image: a row for each sample, with image, mask and prediction from left to right. Classes are black,
/// white, red, green, blue … Small images are enlarged by a whole number, large ones subsampled.
Image side_by_side(const at::Tensor& images, const at::Tensor& masks, const at::Tensor& predictions);

}  // namespace tessera::examples
