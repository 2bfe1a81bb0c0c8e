// The task `data.type: tensors`, `model.type: torchscript`: a model and data brought along from Python. docs/own_model.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "examples/torchscript/dataset.h"
#include "examples/torchscript/loss.h"
#include "train/registry.h"
#include "train/task.h"

namespace tessera::examples {

struct TensorsOptions {
  std::string model_path;           ///< model.path: what torch.jit.save wrote
  Loss loss = Loss::kModel;         ///< model.loss
  std::string path;                 ///< data.path: .safetensors, .h5
  std::string eval_path;            ///< data.eval_path: the same for the test set; empty: data.eval_fraction
  double eval_fraction = 0;         ///< of the end of `path`
  std::vector<std::string> inputs;  ///< data.inputs: tensors that forward takes, in this order
  std::string target;               ///< data.target; empty: none, and the model needs none
};

/// Local. From the sections `model` and `data`. Throws ConfigError.
TensorsOptions read_tensors_options(const config::Section& model, const config::Section& data);

/// The metrics are the loss (mean over what the loss function counts: samples, pixels, tokens that are not -100) and, for class
/// numbers, the accuracy. With the model's own loss, each batch of an evaluation counts with its number of samples.
class TensorsTask final : public train::Task {
 public:
  /// Local. Opens model and data, whose test set must have samples like those of training. Throws DataError, ConfigError.
  explicit TensorsTask(const TensorsOptions& options);

  std::string_view name() const override { return "torchscript"; }
  int64_t train_size() const override { return num_train_; }
  int64_t eval_size() const override { return test_ ? test_->size() : train_.size() - num_train_; }
  /// Also runs the model once, in evaluation, on the first samples: what does not fit is found before training. Throws DataError.
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options) override;
  train::Batch train_batch(const std::vector<int64_t>& indices, at::Generator) const override;
  train::Batch eval_batch(const std::vector<int64_t>& indices) const override;
  at::Tensor loss(const train::Batch& batch) override;
  at::Tensor statistics(const train::Batch& batch) override;
  std::vector<std::string> metric_names() const override;
  train::Metrics metrics(const at::Tensor& total) const override;

 private:
  train::Batch make_batch(const TensorSet& set, const std::vector<int64_t>& rows) const;
  const TensorSet& eval_set() const { return test_ ? *test_ : train_; }
  at::Tensor forward(const train::Batch& batch, const TensorSet& set);
  void check_output(const at::Tensor& output, const train::Batch& batch, const TensorSet& set) const;
  void try_out(int64_t batch_size);

  TensorsOptions options_;
  TensorSet train_;
  std::unique_ptr<TensorSet> test_;
  int64_t num_train_;
  std::shared_ptr<torch::jit::Module> model_;
  std::unique_ptr<TypedEngine<torch::jit::Module>> engine_;
};

/// Local. Makes the task known under its names.
void register_torchscript(train::Registry& registry);

}  // namespace tessera::examples
