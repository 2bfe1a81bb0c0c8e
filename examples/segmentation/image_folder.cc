#include "examples/segmentation/image_folder.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "core/ascii.h"
#include "core/error.h"
#include "core/str.h"
#include "zero/kernels/parallel.h"

namespace tessera::examples {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxShown = 8;  // values in an error's text

/// The PNG and JPEG files in a folder: name without extension -> path.
std::map<std::string, std::string> list_images(const std::string& folder, const std::string& key) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error)
    throw DataError(folder, ": cannot be read: ", error.message(), "; expected a folder (", key, ")");
  std::map<std::string, std::string> files;
  for (const fs::directory_entry& entry : entries) {
    const std::string ending = ascii_lower(entry.path().extension().string());
    const std::string stem = entry.path().stem().string();
    if (stem.starts_with(".") || (ending != ".png" && ending != ".jpg" && ending != ".jpeg")) continue;
    const auto [other, is_new] = files.emplace(stem, entry.path().string());
    if (!is_new) {
      const std::set<std::string> both = {
          other->second, entry.path().string()};  // sorted, since directories are listed in any order
      throw DataError(*both.rbegin(), ": has the same name as ", *both.begin(),
                      " but for the ending; expected one of the two");
    }
  }
  return files;
}

/// ", found car_1_mask.gif, which is neither" if there is such a file.
std::string found_instead(const std::string& folder, const std::string& stem) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
    if (entry.path().stem() == stem) return str(", found ", entry.path().filename(), ", which is neither");
  return "";
}

/// Calls visit(value, is_as_before) for every pixel; a mask has long runs of one value.
template <class Visit>
void for_each_value(const Image& mask, const Visit& visit) {
  int64_t before = -1;
  const uint8_t* from = mask.pixels.data();
  for (int64_t pixel = 0; pixel < mask.width * mask.height; ++pixel) {
    int64_t value = 0;
    for (int64_t channel = 0; channel < mask.channels; ++channel) value = value << 8 | *from++;
    visit(value, value == before);
    before = value;
  }
}

std::set<int64_t> distinct_values(const Image& mask) {
  std::set<int64_t> values;
  for_each_value(mask, [&](int64_t value, bool is_as_before) {
    if (!is_as_before) values.insert(value);
  });
  return values;
}

/// (1, C, H, W) fp32
at::Tensor to_tensor(const Image& image) {
  const at::Tensor bytes = at::from_blob(const_cast<uint8_t*>(image.pixels.data()),
                                         {image.height, image.width, image.channels}, at::kByte);
  return bytes.permute({2, 0, 1}).to(at::kFloat).unsqueeze(0);
}

std::string shown(const std::vector<int64_t>& values) {
  const std::vector<int64_t> first(values.begin(),
                                   values.begin() + static_cast<int64_t>(std::min(values.size(), kMaxShown)));
  return join(first, ", ") + (values.size() > kMaxShown ? " …" : "");
}

}  // namespace

ImageFolder::ImageFolder(const ImageFolderOptions& options) : options_(options) {
  find_pairs();
  const std::vector<Checked> checked = check_all();
  set_size(checked);
  set_values(checked);
}

void ImageFolder::find_pairs() {
  const auto images = list_images(options_.images, "data.images");
  auto masks = list_images(options_.masks, "data.masks");
  if (images.empty())
    throw DataError(options_.images, ": has no PNG or JPEG files; expected images (data.images)");
  for (const auto& [stem, path] : images) {
    const auto mask = masks.find(stem + options_.mask_suffix);
    if (mask == masks.end()) {
      const std::string wanted = stem + options_.mask_suffix;
      throw DataError(path, ": has no mask; expected ", fs::path(options_.masks) / wanted,
                      ".png, .jpg or .jpeg", found_instead(options_.masks, wanted));
    }
    pairs_.push_back({path, mask->second});
    masks.erase(mask);
  }
  if (!masks.empty())
    throw DataError(masks.begin()->second, ": is the mask of no image; expected one in ", options_.images,
                    " of its name without \"", options_.mask_suffix, "\" (data.mask_suffix)");
}

ImageFolder::Checked ImageFolder::check(const Pair& pair) const {
  const Image image = options_.verify ? read_image(pair.image) : read_image_header(pair.image);
  const bool decode_mask = options_.verify || options_.mask_values.empty();
  const Image mask = decode_mask ? read_image(pair.mask, Palette::kIndices)
                                 : read_image_header(pair.mask, Palette::kIndices);
  if (image.width != mask.width || image.height != mask.height)
    throw DataError(pair.mask, ": has ", mask.width, " x ", mask.height, " pixels, but its image ",
                    pair.image, " has ", image.width, " x ", image.height, "; expected the same");
  return {image.width, image.height, mask.channels,
          decode_mask ? distinct_values(mask) : std::set<int64_t>{}};
}

std::vector<ImageFolder::Checked> ImageFolder::check_all() const {
  std::vector<Checked> checked(pairs_.size());
  std::vector<std::optional<DataError>> errors(pairs_.size());
  kernels::parallel_chunks(size(), [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      try {
        checked[i] = check(pairs_[i]);
      } catch (const DataError& error) {
        errors[i] = error;
        return;
      }
    }
  });
  for (const auto& error : errors)
    if (error) throw *error;
  return checked;
}

void ImageFolder::set_size(const std::vector<Checked>& checked) {
  if (!options_.size.empty()) {
    height_ = options_.size[0];
    width_ = options_.size[1];
    return;
  }
  const auto scaled = [&](int64_t edge) {
    return static_cast<int64_t>(options_.scale * static_cast<double>(edge));
  };
  height_ = scaled(checked[0].height);
  width_ = scaled(checked[0].width);
  if (height_ == 0 || width_ == 0)
    throw DataError(pairs_[0].image, ": has ", checked[0].width, " x ", checked[0].height,
                    " pixels; with data.scale ", options_.scale, " nothing would be left");
  for (size_t i = 1; i < checked.size(); ++i) {
    if (checked[i].width == checked[0].width && checked[i].height == checked[0].height) continue;
    throw DataError(pairs_[i].image, ": has ", checked[i].width, " x ", checked[i].height, " pixels, but ",
                    pairs_[0].image, " has ", checked[0].width, " x ", checked[0].height,
                    "; expected images of one size, or data.size to resize them to");
  }
}

void ImageFolder::set_values(const std::vector<Checked>& checked) {
  std::set<int64_t> found;
  for (size_t i = 0; i < checked.size(); ++i) {
    if (checked[i].mask_channels != checked[0].mask_channels)
      throw DataError(pairs_[i].mask, ": has ", checked[i].mask_channels, " channels, but ", pairs_[0].mask,
                      " has ", checked[0].mask_channels, "; expected masks of one kind");
    for (const int64_t value : checked[i].values) {
      found.insert(value);
      const auto& allowed = options_.mask_values;
      if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), value) == allowed.end())
        throw DataError(pairs_[i].mask, ": has the value ", value, "; expected data.mask_values, ",
                        shown(allowed));
    }
  }
  values_ =
      options_.mask_values.empty() ? std::vector<int64_t>(found.begin(), found.end()) : options_.mask_values;
  if (static_cast<int64_t>(values_.size()) > options_.num_classes)
    throw DataError(options_.masks, ": its masks have ", values_.size(), " values (", shown(values_),
                    "); expected at most ", options_.num_classes,
                    ", one for each class (model.num_classes; JPEG masks don't keep their values)");
  // Other files may have the values that are missing here, and classes would have other numbers there.
  if (static_cast<int64_t>(values_.size()) < options_.num_classes && options_.mask_values.empty())
    throw DataError(options_.masks, ": its masks have ", values_.size(), " values (", shown(values_),
                    ") for ", options_.num_classes,
                    " classes (model.num_classes); expected data.mask_values, the values "
                    "in the order of the classes");
  for (size_t i = 0; i < values_.size(); ++i) class_of_value_.emplace(values_[i], static_cast<uint8_t>(i));
}

/// (1, 1, H, W) fp32
at::Tensor ImageFolder::classes_of(const Image& mask, const std::string& path) const {
  const at::Tensor classes = at::empty({1, 1, mask.height, mask.width}, at::kFloat);
  float* to = classes.data_ptr<float>();
  float of_value = 0;
  for_each_value(mask, [&](int64_t value, bool is_as_before) {
    if (!is_as_before) {
      const auto known = class_of_value_.find(value);
      if (known == class_of_value_.end())
        throw DataError(path, ": has the value ", value, "; expected one of ", shown(values_));
      of_value = static_cast<float>(known->second);
    }
    *to++ = of_value;
  });
  return classes;
}

SegmentationSample ImageFolder::sample(int64_t index) const {
  const Pair& pair = pairs_[static_cast<size_t>(index)];
  const Image file = read_image(pair.image);
  at::Tensor image = to_tensor(file);
  if (file.channels == 1) image = image.expand({1, 3, file.height, file.width});
  if (file.channels == 4) image = image.narrow(1, 0, 3);
  at::Tensor mask = classes_of(read_image(pair.mask, Palette::kIndices), pair.mask);
  if (file.height != height_ || file.width != width_)
    image = at::_upsample_bilinear2d_aa(image, {height_, width_}, /*align_corners=*/false);
  if (mask.size(2) != height_ || mask.size(3) != width_)
    mask = at::_upsample_nearest_exact2d(mask, {height_, width_});
  return {image[0].round().clamp(0, 255).to(at::kByte).contiguous(), mask[0][0].to(at::kByte)};
}

}  // namespace tessera::examples
