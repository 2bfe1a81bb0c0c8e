// evaluate: every sample of a set exactly once, over all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/progress.h"
#include "train/task.h"
#include "train/trainer_config.h"

namespace tessera::train {

enum class EvaluationSet {
  kOnTheWay,  ///< eval_size() samples
  kTest,      ///< test_size() samples
};

struct Evaluation {
  int64_t num_samples = 0;
  Metrics metrics;
  double seconds = 0;
  EvaluationSet of = EvaluationSet::kOnTheWay;
  std::string set =
      "test";  ///< what its samples are: "validation" on the way of a task that has a test set besides
  std::string report = {};  ///< the task's

  /// Local. "eval" or "test": what it is called in files, by monitors and on the
  /// screen, as by Hugging Face's Trainer.
  const char* name() const { return of == EvaluationSet::kTest ? "test" : "eval"; }
  /// Local. The metric of this name, if there is one.
  std::optional<double> find(const std::string& name) const;
};

/// Collective. Puts the engine into evaluation mode, and leaves it there. By trainer.eval_batch_size and
/// dataloader_*. The result is equal on every rank. Shows a bar that vanishes at the end.
Evaluation evaluate(Task& task, Engine& engine, const TrainerConfig& trainer, const Display& display,
                    EvaluationSet set = EvaluationSet::kOnTheWay);

}  // namespace tessera::train
