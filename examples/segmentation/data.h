// Data for segmentation: images with a class for each pixel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::examples {

/// All samples of a set have the same height and width. Contiguous, on the CPU.
struct SegmentationSample {
  at::Tensor image;  ///< (3, H, W) uint8, RGB
  at::Tensor mask;   ///< (H, W) uint8, classes; 0 is the background
};

/// A set of samples, made or read on demand. Implementations are immutable and thread-safe.
class SegmentationData {
 public:
  virtual ~SegmentationData() = default;

  virtual int64_t size() const = 0;
  virtual int64_t height() const = 0;
  virtual int64_t width() const = 0;
  /// The same at every call. Throws DataError.
  virtual SegmentationSample sample(int64_t index) const = 0;
};

}  // namespace tessera::examples
