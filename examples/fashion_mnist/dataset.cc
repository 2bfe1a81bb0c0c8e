#include "examples/fashion_mnist/dataset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <vector>

#include "core/error.h"
#include "examples/fashion_mnist/idx.h"

namespace tessera::examples {
namespace {

/// `directory/name.gz` or `directory/name`, whichever exists.
std::string find_file(const std::string& directory, const std::string& name) {
  for (const char* suffix : {".gz", ""}) {
    const std::string path = (std::filesystem::path(directory) / (name + suffix)).string();
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return path;
  }
  throw DataError(
      std::filesystem::path(directory) / name,
      "[.gz]: not found; data.path must be a folder with the four IDX files of Fashion-MNIST (Debian package "
      "dataset-fashion-mnist brings them) or of MNIST");
}

/// Read-only: the memory may be a mapped file.
at::Tensor to_tensor(const IdxArray& array, at::IntArrayRef shape) {
  return at::from_blob(
      const_cast<uint8_t*>(array.values.data()), shape, [storage = array.storage](void*) {}, at::kByte);
}

}  // namespace

LabelledImages load_split(const std::string& directory, Split split) {
  const std::string prefix = split == Split::kTrain ? "train" : "t10k";
  const std::string images_path = find_file(directory, prefix + "-images-idx3-ubyte");
  const std::string labels_path = find_file(directory, prefix + "-labels-idx1-ubyte");
  const IdxArray labels = read_idx(labels_path, {kAnySize});
  const IdxArray images = read_idx(images_path, {kAnySize, kImageSize, kImageSize});
  if (images.shape[0] != labels.shape[0]) {
    throw DataError(labels_path, ": ", labels.shape[0], " labels, but ", images_path, " has ",
                    images.shape[0], " images; expected as many of each");
  }
  const auto wrong =
      std::find_if(labels.values.begin(), labels.values.end(), [](uint8_t v) { return v >= kNumClasses; });
  if (wrong != labels.values.end()) {
    throw DataError(labels_path, ": label ", wrong - labels.values.begin(), " is ", static_cast<int>(*wrong),
                    ", expected 0 to ", kNumClasses - 1);
  }
  return {to_tensor(images, {images.shape[0], 1, kImageSize, kImageSize}),
          to_tensor(labels, {labels.shape[0]})};
}

PixelStatistics pixel_statistics(const LabelledImages& data) {
  std::array<int64_t, 256> counts{};  // exact, and one cheap pass over the bytes
  const uint8_t* pixels = data.images.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < data.images.numel(); ++i) ++counts[pixels[i]];
  double sum = 0;
  double sum_of_squares = 0;
  for (size_t value = 0; value < counts.size(); ++value) {
    const double x = static_cast<double>(value) / 255.0;
    sum += x * static_cast<double>(counts[value]);
    sum_of_squares += x * x * static_cast<double>(counts[value]);
  }
  const auto numel = static_cast<double>(data.images.numel());
  const double mean = sum / numel;
  const double variance = sum_of_squares / numel - mean * mean;
  return {mean, variance > 0 ? std::sqrt(variance) : 1.0};
}

}  // namespace tessera::examples
