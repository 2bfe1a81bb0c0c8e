// The tasks `data.type: image_masks` (folders of images and masks, as Carvana's) and `data.type:
// fashion_composites` (synthetic images with known masks), `model.type: unet`: classifies each pixel.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/segmentation/composites.h"
#include "examples/segmentation/data.h"
#include "examples/segmentation/image_folder.h"
#include "examples/segmentation/model.h"
#include "train/task/registry.h"
#include "train/task/task.h"

namespace tessera::examples {

struct SegmentationOptions {
  double validation_fraction = 0.1;  ///< data.validation_fraction: of the samples, chosen at random
  uint64_t seed = 0;  ///< data.seed: for the split and the synthetic images; independent of the run's seed
  bool flip = false;  ///< data.flip: mirrors training images and masks at random, horizontally
  UNetOptions model;
};

/// The options common to both data types. Their other keys are read by the functions below. Throws
/// ConfigError.
SegmentationOptions read_segmentation_options(const config::Section& model, const config::Section& data);
/// The keys of one data type. Throw ConfigError.
CompositesOptions read_composites_options(const config::Section& data);
ImageFolderOptions read_image_folder_options(const config::Section& data);

class Segmentation final : public train::Task {
 public:
  /// Splits `data` into training and validation sets, equally on every machine and for any number of
  /// ranks. Throws ConfigError if the images are too small for model.depth.
  Segmentation(const SegmentationOptions& options, std::unique_ptr<SegmentationData> data);

  std::string_view name() const override { return "segmentation"; }
  int64_t train_size() const override { return static_cast<int64_t>(train_.size()); }
  int64_t eval_size() const override { return static_cast<int64_t>(validation_.size()); }
  std::string_view eval_set_name() const override { return "validation"; }
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  train::Batch train_batch(const std::vector<int64_t>& indices, at::Generator generator) const override;
  train::Batch eval_batch(const std::vector<int64_t>& indices) const override;
  at::Tensor loss(const train::Batch& batch) override;
  at::Tensor statistics(const train::Batch& batch) override;
  std::vector<std::string> metric_names() const override { return {"dice", "loss"}; }
  train::Metrics metrics(const at::Tensor& total) const override;
  /// step_00000100.png: the first validation samples with their masks and predictions.
  std::vector<train::SampleFile> write_samples(const std::filesystem::path& folder, int64_t step) override;

  const std::vector<int64_t>& validation_indices() const {
    return validation_;
  }  ///< samples of the data, in the order of evaluation

 private:
  /// Samples of the data set: (B, 3, H, W) uint8 and (B, H, W) uint8, on the CPU.
  std::pair<at::Tensor, at::Tensor> gather(const std::vector<int64_t>& samples) const;
  train::Batch make_batch(const at::Tensor& images, const at::Tensor& masks) const;

  SegmentationOptions options_;
  std::unique_ptr<SegmentationData> data_;
  std::vector<int64_t> train_, validation_;  // numbers of samples
  std::unique_ptr<TypedEngine<UNetImpl>> engine_;
};

/// Adds the tasks to `registry`.
void register_segmentation(train::Registry& registry);

}  // namespace tessera::examples
