// Task: a model with its data sets, loss and metrics, for a Trainer. An example only implements this class.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/engine.h"
#include "train/task/sampler.h"

namespace tessera::train {

/// Samples of one micro-step. A task makes them on the CPU and gets them back on the engine's device. B is
/// the number of samples.
struct Batch {
  std::vector<at::Tensor> inputs;  ///< the arguments of the model's forward, each (B, …)
  at::Tensor target;               ///< (B, …)
  /// (B) bool, evaluation only: false for padding, which a task must not count. Undefined in training, where
  /// all rows are samples.
  at::Tensor mask;
};

/// Results by name ("accuracy", "loss" …), in the order of display.
using Metrics = std::vector<std::pair<std::string, double>>;

/// A file written by Task::write_samples.
struct SampleFile {
  std::string name;  ///< of its contents, the same at each step: "predictions"
  std::filesystem::path file;
};

/// Supplies a model and its data sets. Owns both, and the engine once initialize() was called. Used by one
/// thread, except for train_batch(), eval_batch() and test_batch(), which the workers of a DataLoader call
/// concurrently.
///
/// Evaluation is a sum: statistics() turns a batch into a vector of numbers that can be added over batches
/// and ranks (counts, sums, a confusion matrix), and metrics() computes the results from the total. So every
/// metric is exact for any number of ranks.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::string_view name() const = 0;
  /// Number of samples of the training set, and of the set evaluated during training: the validation
  /// set, or the test set of a task without one.
  virtual int64_t train_size() const = 0;
  virtual int64_t eval_size() const = 0;
  /// Number of samples of the test set of a task with a validation set, which is evaluated once, at
  /// the end, with the final weights. 0: none.
  virtual int64_t test_size() const { return 0; }
  /// The name of the set of eval_size(): "validation" or "test".
  virtual std::string_view eval_set_name() const { return test_size() > 0 ? "validation" : "test"; }

  /// The training order. Its drop_last is overwritten by trainer.dataloader_drop_last.
  virtual TrainOrder train_order() const { return {}; }

  /// Collective. Builds the model and its engine: tessera::initialize() with a function that makes the model,
  /// so that it is never whole in memory. To be called once. The engine lives as long as the task.
  virtual Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                             const InitOptions& options) = 0;

  /// Thread-safe. The samples with these indices, on the CPU. Random augmentation must use only
  /// `generator`, a CPU generator seeded for this batch, so that the batch does not depend on the thread or
  /// time. Throws DataError.
  virtual Batch train_batch(const std::vector<int64_t>& indices, at::Generator generator) const = 0;
  /// Thread-safe. Samples of the sets of eval_size() and test_size(), on the CPU, without a mask, the
  /// same at every call. Throw DataError.
  virtual Batch eval_batch(const std::vector<int64_t>& indices) const = 0;
  virtual Batch test_batch(const std::vector<int64_t>&) const { return {}; }

  /// Collective at stage 3. Forward pass. Returns the scalar loss: the mean over the batch, weighted by
  /// train_order().weights. It must be finite (for example 0) if all weights are 0.
  virtual at::Tensor loss(const Batch& batch) = 0;
  /// Collective at stage 3. Forward pass without gradients. Returns (K) fp64 on the engine's device, with K
  /// always the same. Element 0 is the number of samples counted.
  virtual at::Tensor statistics(const Batch& batch) = 0;
  /// The names in metrics(), which must include trainer.metric_for_best. Called before any evaluation.
  virtual std::vector<std::string> metric_names() const = 0;
  /// Metrics from the sum of all statistics, (K) fp64 on the CPU. Contains "loss" if there is one.
  virtual Metrics metrics(const at::Tensor& total) const = 0;
  /// Makes from the same sum a text with more detail for the end of a run, such as a table; empty: none.
  virtual std::string report(const at::Tensor&) const { return {}; }

  /// Names and contents of files to write beside the trained model, such as its vocabulary.
  virtual std::vector<std::pair<std::string, std::string>> files() const { return {}; }
  /// How to match given weights (`tessera train --init`) to the model.
  virtual LoadWeightsOptions init_weights() const { return {}; }

  /// Collective. Called in evaluation mode after each evaluation, or at the end of a run without evaluations.
  /// Rank 0 may write files for people to look at into `folder`, which need not exist yet. Returns those for
  /// the monitors: images as .png, texts as .txt. A DataError that rank 0 throws after its collectives
  /// becomes a warning.
  virtual std::vector<SampleFile> write_samples(const std::filesystem::path&, int64_t /*step*/) { return {}; }
};

}  // namespace tessera::train
