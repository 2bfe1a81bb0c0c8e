#include "examples/segmentation/task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "examples/segmentation/losses.h"
#include "examples/segmentation/pictures.h"
#include "train/run/run_directory.h"
#include "train/task/sampler.h"

namespace tessera::examples {
namespace {

constexpr int64_t kNumPictures = 4;  // per file of samples
constexpr int64_t kMaxSeed = 9'000'000'000'000'000;

std::vector<int64_t> picked(const std::vector<int64_t>& numbers, const std::vector<int64_t>& indices) {
  std::vector<int64_t> samples;
  for (const int64_t index : indices) samples.push_back(numbers[static_cast<size_t>(index)]);
  return samples;
}

}  // namespace

SegmentationOptions read_segmentation_options(const config::Section& model, const config::Section& data) {
  SegmentationOptions options;
  data.required_text("type");
  options.validation_fraction = data.number("validation_fraction", options.validation_fraction, 0.0, 0.9);
  options.seed = static_cast<uint64_t>(data.integer("seed", 0, 0, kMaxSeed));
  options.flip = data.boolean("flip", options.flip);
  UNetOptions& unet = options.model;
  model.required_text("type");
  unet.in_channels = model.integer("in_channels", unet.in_channels, 1, 3);
  unet.num_classes = model.integer("num_classes", unet.num_classes, 1, 256);
  unet.base_channels = model.integer("base_channels", unet.base_channels, 1, 4096);
  unet.depth = model.integer("depth", unet.depth, 1, 8);
  unet.bilinear = model.boolean("bilinear", unet.bilinear);
  model.finish();
  if (unet.in_channels == 2) model.fail("in_channels", "found 2; expected 3 (RGB) or 1 (grey)");
  return options;
}

CompositesOptions read_composites_options(const config::Section& data) {
  CompositesOptions options;
  options.path = data.text("path", options.path);
  options.num_images = data.integer("num_images", options.num_images, 1, 1'000'000);
  options.size = data.integer("size", options.size, 8, 4096);
  options.max_items = data.integer("max_items", options.max_items, 1, 1000);
  options.seed = static_cast<uint64_t>(data.integer("seed", 0, 0, kMaxSeed));
  data.finish();
  return options;
}

ImageFolderOptions read_image_folder_options(const config::Section& data) {
  ImageFolderOptions options;
  options.images = data.required_text("images");
  options.masks = data.required_text("masks");
  options.mask_suffix = data.text("mask_suffix", options.mask_suffix);
  options.scale = data.number("scale", options.scale, 0.001, 1.0);
  options.size = data.integers("size", {}, 1, 8192);
  options.mask_values = data.integers("mask_values", {}, 0, int64_t{0xffffffff});
  options.verify = data.boolean("verify", options.verify);
  data.finish();
  if (!options.size.empty() && options.size.size() != 2)
    data.fail("size", str("found ", options.size.size(), " numbers; expected two, height and width"));
  return options;
}

Segmentation::Segmentation(const SegmentationOptions& options, std::unique_ptr<SegmentationData> data)
    : options_(options), data_(std::move(data)) {
  const int64_t smallest = int64_t{1} << options.model.depth;
  if (data_->height() < smallest || data_->width() < smallest)
    throw ConfigError("model.depth: found ", options.model.depth, ", which needs images of at least ",
                      smallest, " x ", smallest, " pixels, but the data have ", data_->width(), " x ",
                      data_->height(), "; expected less, or larger images");
  train::Parts parts = train::split_into_parts(
      data_->size(),
      {.validation_fraction = options.validation_fraction, .test_fraction = 0, .seed = options.seed});
  train_ = std::move(parts.train);
  validation_ = std::move(parts.validation);
}

Engine& Segmentation::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                 const InitOptions& options) {
  engine_ = tessera::initialize([this] { return UNet(options_.model); }, config, std::move(comm), options);
  return *engine_;
}

std::pair<at::Tensor, at::Tensor> Segmentation::gather(const std::vector<int64_t>& samples) const {
  std::vector<at::Tensor> images, masks;
  for (const int64_t number : samples) {
    SegmentationSample sample = data_->sample(number);
    images.push_back(std::move(sample.image));
    masks.push_back(std::move(sample.mask));
  }
  return {at::stack(images), at::stack(masks)};
}

train::Batch Segmentation::make_batch(const at::Tensor& images, const at::Tensor& masks) const {
  at::Tensor input = images.to(at::kFloat).div_(255);  // (B, 3, H, W)
  if (options_.model.in_channels == 1)                 // grey, as ITU-R BT.601 and Pillow weigh it
    input = (input * at::tensor({0.299, 0.587, 0.114}, input.options()).view({1, 3, 1, 1}))
                .sum(1, /*keepdim=*/true);
  train::Batch batch;
  batch.inputs = {input};              // (B, in_channels, H, W)
  batch.target = masks.to(at::kLong);  // (B, H, W)
  return batch;
}

train::Batch Segmentation::train_batch(const std::vector<int64_t>& indices, at::Generator generator) const {
  auto [images, masks] = gather(picked(train_, indices));
  if (options_.flip) {
    const at::Tensor mirrored = at::rand({images.size(0), 1, 1}, std::move(generator)) < 0.5;
    images = at::where(mirrored.unsqueeze(1), images.flip(3), images);
    masks = at::where(mirrored, masks.flip(2), masks);
  }
  return make_batch(images, masks);
}

train::Batch Segmentation::eval_batch(const std::vector<int64_t>& indices) const {
  const auto [images, masks] = gather(picked(validation_, indices));
  return make_batch(images, masks);
}

at::Tensor Segmentation::loss(const train::Batch& batch) {
  return segmentation_loss(engine_->forward(batch.inputs[0]), batch.target);
}

at::Tensor Segmentation::statistics(const train::Batch& batch) {
  return segmentation_statistics(engine_->forward(batch.inputs[0]), batch.target, batch.mask);
}

train::Metrics Segmentation::metrics(const at::Tensor& total) const { return segmentation_metrics(total); }

std::vector<train::SampleFile> Segmentation::write_samples(const std::filesystem::path& folder,
                                                           int64_t step) {
  if (validation_.empty()) return {};
  const std::vector<int64_t> samples(validation_.begin(),
                                     validation_.begin() + std::min(kNumPictures, eval_size()));
  // A sample that cannot be read ends the run, as in an evaluation: the other ranks are about to start a
  // forward pass, which is collective.
  const auto [images, masks] = [&] {
    try {
      return gather(samples);
    } catch (const DataError& error) {
      throw Error(error.what());
    }
  }();
  at::Tensor logits;
  {
    const at::NoGradGuard no_grad;
    logits = engine_->forward(make_batch(images, masks).inputs[0]);
  }
  if (engine_->rank() != 0) return {};
  const std::filesystem::path path = train::sample_path(folder, step, ".png");
  write_png(path.string(), side_by_side(images, masks.to(at::kLong), predicted_mask(logits).cpu()));
  return {{"predictions", path}};
}

void register_segmentation(train::Registry& registry) {
  registry.add(
      "fashion_composites", "unet",
      [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
        const SegmentationOptions options = read_segmentation_options(model, data);
        const CompositesOptions composites = read_composites_options(data);
        if (options.model.num_classes > 2)
          model.fail("num_classes",
                     str("found ", options.model.num_classes,
                         ", but data.type fashion_composites has background and clothing; expected 2 or 1"));
        return std::make_unique<Segmentation>(options, std::make_unique<FashionComposites>(composites));
      });
  registry.add("image_masks", "unet",
               [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
                 const SegmentationOptions options = read_segmentation_options(model, data);
                 ImageFolderOptions folder = read_image_folder_options(data);
                 folder.num_classes = std::max<int64_t>(options.model.num_classes, 2);
                 return std::make_unique<Segmentation>(options, std::make_unique<ImageFolder>(folder));
               });
}

}  // namespace tessera::examples
