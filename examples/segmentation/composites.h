// Synthetic images with known masks, made from Fashion-MNIST: pieces of clothing, tinted, scaled and placed
// on textured backgrounds.
//
// Picture i depends only on (seed, i), on every machine and compiler: random numbers come from
// std::mt19937_64, whose values the standard fixes (its distributions are not fixed, and not used), and
// pixels are computed with + - * / only.
//
// No piece of clothing twice.
// Picture i uses the pieces i * max_items … i * max_items + max_items - 1, so no two pictures
// share a piece, and pictures of the validation set show unseen pieces.
#pragma once

#include <cstdint>
#include <string>

#include "examples/segmentation/data.h"

namespace tessera::examples {

struct CompositesOptions {
  std::string path = "/usr/share/datasets/fashion-mnist";  ///< data.path: folder with the four IDX files
  int64_t num_images = 2000;                               ///< data.num_images
  int64_t size = 64;                                       ///< data.size: height and width
  int64_t max_items = 4;                                   ///< data.max_items: a picture has 1 to max_items
  uint64_t seed = 0;                                       ///< data.seed
};

class FashionComposites final : public SegmentationData {
 public:
  /// Reads Fashion-MNIST's training images. Throws DataError; ConfigError if num_images *
  /// max_items exceeds the number of its images.
  explicit FashionComposites(const CompositesOptions& options);

  int64_t size() const override { return options_.num_images; }
  int64_t height() const override { return options_.size; }
  int64_t width() const override { return options_.size; }
  /// Class 1 is clothing.
  SegmentationSample sample(int64_t index) const override;

 private:
  CompositesOptions options_;
  at::Tensor items_;  // (N, 28, 28) uint8
};

}  // namespace tessera::examples
