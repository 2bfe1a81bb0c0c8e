// Task: what a Trainer trains. A new example implements this class and nothing else.
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
#include "train/sampler.h"

namespace tessera::train {

/// Samples of one micro-step: on the CPU as a task makes them, on the engine's device as it is
/// given them. B is the number of samples.
struct Batch {
  std::vector<at::Tensor> inputs;  ///< what the model's forward takes, each (B, …)
  at::Tensor target;               ///< (B, …)
  /// (B) bool, evaluation only: false for padding, which a task must not count. Undefined in
  /// training, where every row is a sample.
  at::Tensor mask;
};

/// Results by name ("accuracy", "loss" …), in the order in which they are shown.
using Metrics = std::vector<std::pair<std::string, double>>;

/// A file that a task has written for people to look at.
struct SampleFile {
  std::string name;  ///< of what it shows, the same at each step: "predictions"
  std::filesystem::path file;
};

/// A data set and the model that is trained on it. Owns both, and the engine once initialize() was called.
/// One thread uses it, but for the const train_batch(), eval_batch() and test_batch(), which workers of a
/// DataLoader call at any time, several at once.
///
/// Evaluation is a sum: statistics() turns a batch into a vector of numbers that may be added over batches
/// and over ranks (counts, sums, a confusion matrix), and metrics() turns the grand total into results. So
/// every metric is exact, whatever the number of ranks.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::string_view name() const = 0;
  /// Local. Samples of the training set, and of the set that is evaluated on the way: the validation set, or,
  /// in a task without one, the test set.
  virtual int64_t train_size() const = 0;
  virtual int64_t eval_size() const = 0;
  /// Local. Samples of the test set of a task with a validation set: evaluated once, at the
  /// end, with the best weights. 0: none.
  virtual int64_t test_size() const { return 0; }
  /// Local. What the set of eval_size() is called: "validation" where it is
  /// part of what there was to train with.
  virtual std::string_view eval_set_name() const { return test_size() > 0 ? "validation" : "test"; }

  /// Local. The order of training, but for drop_last, which trainer.dataloader_drop_last says.
  virtual TrainOrder train_order() const { return {}; }

  /// Collective. Builds the model and wraps it (tessera::initialize), once; the
  /// engine lives as long as the task.
  virtual Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                             const InitOptions& options) = 0;

  /// Local, thread-safe. The samples of these numbers, on the CPU. What is random about them (augmentation)
  /// is drawn from `generator`, a CPU generator of this batch's own, and from nothing else: then the batch is
  /// the same whoever makes it, and when. Throws DataError.
  virtual Batch train_batch(const std::vector<int64_t>& indices, at::Generator generator) const = 0;
  /// Local, thread-safe. From the sets of eval_size() and test_size(): on the CPU, without a mask, the
  /// same at every call. Throw DataError.
  virtual Batch eval_batch(const std::vector<int64_t>& indices) const = 0;
  virtual Batch test_batch(const std::vector<int64_t>&) const { return {}; }

  /// Collective at stage 3. Forward pass; the scalar loss, averaged over the batch by train_order()'s
  /// weights; 0, or any other finite number, for a batch in which nothing counts.
  virtual at::Tensor loss(const Batch& batch) = 0;
  /// Collective at stage 3. Forward pass without gradients; (K) fp64 on the engine's device, K always the
  /// same. Element 0 is the number of samples counted.
  virtual at::Tensor statistics(const Batch& batch) = 0;
  /// Local. The names of metrics(), known before anything is evaluated:
  /// trainer.metric_for_best is one of them.
  virtual std::vector<std::string> metric_names() const = 0;
  /// Local. From the sum of all statistics, (K) fp64 on the CPU. Contains "loss" where that makes sense.
  virtual Metrics metrics(const at::Tensor& total) const = 0;
  /// Local. From the same sum: lines for the end of a run that say more than metrics do; empty: none.
  virtual std::string report(const at::Tensor&) const { return {}; }

  /// Local. Names and contents of files that belong beside the trained model, such as its vocabulary.
  virtual std::vector<std::pair<std::string, std::string>> files() const { return {}; }
  /// Local. How weights of others fit the model (`tessera train --init`).
  virtual LoadWeightsOptions init_weights() const { return {}; }

  /// Collective. Called after each evaluation, or at the end of a run that has none: may write files for
  /// people to look at into `folder`, which need not exist yet, from rank
  /// 0. Returns what it has written there, for the monitors: pictures as .png, texts as .txt. To be called in
  /// evaluation mode. A DataError that rank 0 throws once its collectives are done becomes a warning.
  virtual std::vector<SampleFile> write_samples(const std::filesystem::path&, int64_t /*step*/) { return {}; }
};

}  // namespace tessera::train
