// The task `data.type: tensors`, `model.type: torchscript`: a model and data made in Python.
// docs/own_model.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "examples/torchscript/data/dataset.h"
#include "examples/torchscript/loss.h"
#include "examples/torchscript/metrics.h"
#include "examples/torchscript/options.h"
#include "examples/torchscript/script_engine.h"
#include "train/task/registry.h"
#include "train/task/task.h"

namespace tessera::examples {

/// The metrics are those of model.metrics and the loss (mean over what the loss function counts:
/// samples, pixels, tokens that are not -100). With the model's own loss, each batch of an
/// evaluation counts with its number of samples.
class TensorsTask final : public train::Task {
 public:
  /// Opens model and data, whose test set must have samples like those of
  /// training. Throws DataError, ConfigError.
  explicit TensorsTask(const TensorsOptions& options);

  std::string_view name() const override { return "torchscript"; }
  int64_t train_size() const override { return train_size_; }
  int64_t eval_size() const override { return test_ ? test_->size() : train_.size() - train_size_; }
  train::TrainOrder train_order() const override {
    return {.shuffle = options_.shuffle, .weights = weights_};
  }
  /// Also runs the model once, in evaluation, on the first samples: what does not fit is found before
  /// training. Throws DataError, ConfigError.
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  train::Batch train_batch(const std::vector<int64_t>& indices, at::Generator) const override;
  train::Batch eval_batch(const std::vector<int64_t>& indices) const override;
  at::Tensor loss(const train::Batch& batch) override;
  at::Tensor statistics(const train::Batch& batch) override;
  std::vector<std::string> metric_names() const override;
  train::Metrics metrics(const at::Tensor& total) const override;
  std::string report(const at::Tensor& total) const override;

 private:
  /// The test set's part of the file, and the rest, by the order of samples in it. Both empty:
  /// the first train_size_ are for training.
  struct Split {
    std::vector<int64_t> train, test;
  };
  Split split() const;
  int64_t train_row(int64_t index) const {
    return split_.train.empty() ? index : split_.train[static_cast<size_t>(index)];
  }
  std::shared_ptr<const std::vector<float>> weigh() const;
  train::Batch make_batch(const TensorSet& set, const std::vector<int64_t>& rows) const;
  const TensorSet& eval_set() const { return test_ ? *test_ : train_; }
  bool own_loss() const { return options_.loss.kind == Loss::kModel; }
  at::Tensor forward(const train::Batch& batch, const TensorSet& set, ForwardMode mode);
  void check_output(const at::Tensor& output, const train::Batch& batch, const TensorSet& set,
                    ForwardMode mode) const;
  at::Tensor statistics_of_own_loss(const train::Batch& batch);
  void try_out(int64_t batch_size);

  TensorsOptions options_;
  TensorSet train_;
  std::unique_ptr<TensorSet> test_;
  int64_t train_size_;
  Split split_;
  std::shared_ptr<const std::vector<float>> weights_;  // of training samples; null: all alike
  LossFunction loss_;
  MetricSet metrics_;
  ScriptEngine model_;
};

/// Converts floating tensors to fp32 (the engine converts them to bf16 or fp16 if it computes in
/// that).
at::Tensor for_layers(const at::Tensor& tensor);

/// Adds the task and its predictor to `registry`.
void register_torchscript(train::Registry& registry);

}  // namespace tessera::examples
