// evaluate(): evaluates every sample of a set exactly once, over all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/report/progress.h"
#include "train/task/task.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

enum class EvaluationSet {
  kEval,  ///< Task::eval_batch(), evaluated during training
  kTest,  ///< Task::test_batch(), evaluated once at the end
};

struct Evaluation {
  int64_t num_samples = 0;
  Metrics metrics;
  double seconds = 0;
  EvaluationSet of = EvaluationSet::kEval;
  std::string set = "test";  ///< for messages: Task::eval_set_name(), or "test"
  std::string report = {};   ///< Task::report()

  /// "eval" or "test": the prefix of its metrics in files, monitors and output, as in Hugging Face's
  /// Trainer.
  const char* name() const { return of == EvaluationSet::kTest ? "test" : "eval"; }
  /// The metric of this name; nullopt if there is none.
  std::optional<double> find(const std::string& name) const;
};

/// Collective. Puts the engine into evaluation mode and leaves it there. Uses trainer.eval_batch_size and
/// trainer.dataloader_*. Shows a progress bar while it runs. The result is equal on every rank.
/// `max_samples`: of a larger set the first ones alone.
Evaluation evaluate(Task& task, Engine& engine, const TrainerConfig& trainer, const Display& display,
                    EvaluationSet set = EvaluationSet::kEval, int64_t max_samples = INT64_MAX);

}  // namespace tessera::train
