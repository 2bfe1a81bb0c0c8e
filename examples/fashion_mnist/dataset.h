// Fashion-MNIST, or MNIST itself: both come as four IDX files of the same names.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace tessera::examples {

inline constexpr int64_t kImageSize = 28;
inline constexpr int64_t kNumClasses = 10;

/// One split as bytes (47 MB for the training set). Read-only: an uncompressed file is mapped. Batches are
/// converted when they are made.
struct LabelledImages {
  at::Tensor images;  ///< (N, 1, 28, 28) uint8
  at::Tensor labels;  ///< (N) uint8, below kNumClasses
  int64_t size() const { return images.size(0); }
};

/// Mean and standard deviation of pixels scaled to [0, 1].
struct PixelStatistics {
  double mean = 0;
  double std = 1;
};

enum class Split { kTrain, kTest };

/// Reads train-images-idx3-ubyte and train-labels-idx1-ubyte (or t10k-…), with or without .gz, from
/// `directory`. Throws DataError naming the file if one is missing, damaged or of another type, if the
/// numbers of images and labels differ, or if a label is out of range.
LabelledImages load_split(const std::string& directory, Split split);

/// Mean and standard deviation of all pixels of `data`.
PixelStatistics pixel_statistics(const LabelledImages& data);

}  // namespace tessera::examples
