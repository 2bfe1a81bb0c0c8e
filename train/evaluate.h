// evaluate: every sample of a set exactly once, over all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/data_loader.h"
#include "train/progress.h"
#include "train/task.h"

namespace tessera::train {

struct Evaluation {
  int64_t num_samples = 0;
  Metrics metrics;
  double seconds = 0;
  std::string set = "test";  ///< "validation" on the way of a task that has a test set besides
  std::string report = {};   ///< the task's

  /// Local. The metric of this name, if there is one.
  std::optional<double> find(const std::string& name) const;
  /// Local. "accuracy, loss": the metrics there are.
  std::string metric_names() const;
};

enum class EvaluationSet {
  kOnTheWay,  ///< eval_size() samples
  kTest,      ///< test_size() samples
};

/// Collective. Puts the engine into evaluation mode, and back into training. `batch_size`: samples a rank sees at
/// once. The result is equal on every rank. Shows a bar that vanishes at the end. `data`: how batches are made; the device is the engine's.
Evaluation evaluate(Task& task, Engine& engine, int64_t batch_size, const Display& display,
                    EvaluationSet set = EvaluationSet::kOnTheWay, DataLoaderOptions data = {});

}  // namespace tessera::train
