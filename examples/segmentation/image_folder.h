// A folder of images and a folder of masks, as milesial/Pytorch-UNet reads the Carvana data:
// images/car_1.jpg with masks/car_1_mask.png.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "examples/segmentation/data.h"
#include "examples/segmentation/image_file.h"

namespace tessera::examples {

struct ImageFolderOptions {
  std::string images;  ///< data.images: PNG and JPEG files; others are ignored
  std::string masks;   ///< data.masks: likewise
  /// data.mask_suffix: follows the image's name in the mask's name, before the extension.
  std::string mask_suffix = "_mask";
  double scale = 0.5;         ///< data.scale: of height and width
  std::vector<int64_t> size;  ///< data.size: {height, width} to resize to, instead of scale; empty: scale
  /// data.mask_values: the masks' values (grey, or a palette's index; 65536 R + 256 G + B of colour) in the
  /// order of the classes. Empty: the values that occur, in increasing order, one for each class.
  std::vector<int64_t> mask_values;
  int64_t num_classes = 2;  ///< number of mask values; largest number where they are given
  bool verify = true;       ///< data.verify: decodes every image before training
};

/// Owns the file names; samples are read on demand. Immutable; thread-safe.
class ImageFolder final : public SegmentationData {
 public:
  /// Finds the pairs and checks their sizes. Decodes all masks if their values are not given, and all
  /// files with `verify`, on all of torch's threads. Throws DataError naming the first file, in sorted order,
  /// with an error: an image without a mask, a mask without an image, two files of one name, a different
  /// size, a file that cannot be decoded, or masks with more values than classes, or fewer.
  explicit ImageFolder(const ImageFolderOptions& options);

  int64_t size() const override { return static_cast<int64_t>(pairs_.size()); }
  int64_t height() const override { return height_; }
  int64_t width() const override { return width_; }
  /// The image is resized as by Pillow's BILINEAR, the mask as by NEAREST.
  SegmentationSample sample(int64_t index) const override;

  const std::vector<int64_t>& mask_values() const { return values_; }  ///< of the classes 0, 1 …

 private:
  struct Pair {
    std::string image, mask;  // paths
  };
  /// The result of checking one pair.
  struct Checked {
    int64_t width = 0, height = 0, mask_channels = 0;
    std::set<int64_t> values;  // of its mask, if it was decoded
  };

  void find_pairs();
  Checked check(const Pair& pair) const;
  std::vector<Checked> check_all() const;
  void set_size(const std::vector<Checked>& checked);
  void set_values(const std::vector<Checked>& checked);
  at::Tensor classes_of(const Image& mask, const std::string& path) const;

  ImageFolderOptions options_;
  std::vector<Pair> pairs_;  // by name
  std::vector<int64_t> values_;
  std::map<int64_t, uint8_t> class_of_value_;
  int64_t height_ = 0, width_ = 0;
};

}  // namespace tessera::examples
