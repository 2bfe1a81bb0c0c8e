// The task `data.type: fashion_mnist`, `model.type: fashion_mnist_cnn`: images of ten
// kinds of clothing (or MNIST's digits).
#pragma once

#include <memory>
#include <string>

#include "examples/fashion_mnist/dataset.h"
#include "examples/fashion_mnist/model.h"
#include "train/task/registry.h"
#include "train/task/task.h"

namespace tessera::examples {

struct FashionMnistOptions {
  std::string path = "/usr/share/datasets/fashion-mnist";  ///< data.path: folder with the four IDX files
  bool flip = false;                                       ///< data.flip: mirror training images at random
  std::vector<std::string> labels;  ///< data.labels: names of the classes in the report; empty: "0" to "9"
  FashionCnnOptions model;
};

/// Reads the options from the sections `model` and `data`. Throws ConfigError.
FashionMnistOptions read_options(const config::Section& model, const config::Section& data);

class FashionMnist final : public train::Task {
 public:
  /// Reads both splits. Throws DataError.
  explicit FashionMnist(const FashionMnistOptions& options);

  std::string_view name() const override { return "fashion_mnist"; }
  int64_t train_size() const override { return train_.size(); }
  int64_t eval_size() const override { return test_.size(); }
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  train::Batch train_batch(const std::vector<int64_t>& indices, at::Generator generator) const override;
  train::Batch eval_batch(const std::vector<int64_t>& indices) const override;
  at::Tensor loss(const train::Batch& batch) override;
  at::Tensor statistics(const train::Batch& batch) override;
  std::vector<std::string> metric_names() const override { return {"accuracy", "loss"}; }
  train::Metrics metrics(const at::Tensor& total) const override;
  std::string report(const at::Tensor& total) const override;

 private:
  train::Batch make_batch(const LabelledImages& data, const std::vector<int64_t>& indices) const;

  FashionMnistOptions options_;
  LabelledImages train_;
  LabelledImages test_;
  PixelStatistics pixels_;  // of the training set
  std::unique_ptr<TypedEngine<FashionCnnImpl>> engine_;
};

/// Adds the task to `registry`.
void register_fashion_mnist(train::Registry& registry);

}  // namespace tessera::examples
