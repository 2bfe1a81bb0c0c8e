// Registry: makes tasks by the configuration's names data.type and model.type.
//
// There is no global table and no registration at load time: a program builds a Registry and adds the tasks
// it supports (tools/ adds the examples; your own program adds its own).
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/config/section.h"
#include "train/task/predictor.h"
#include "train/task/task.h"

namespace tessera::train {

/// Builds a task from the sections `model` and `data`. Reads the options first, calls finish() on both
/// sections, and only then loads data, so that a mistyped key is found at once. `run`: when a run is
/// resumed or its model evaluated, the run's folder, which has the task's files(); empty for a new run.
/// Throws ConfigError, DataError.
using TaskFactory = std::function<std::unique_ptr<Task>(
    const config::Section& model, const config::Section& data, const std::filesystem::path& run)>;

/// Builds a predictor from the same sections and the folder of the run, which has the weights and the task's
/// files(). Throws ConfigError, DataError.
using PredictorFactory = std::function<std::unique_ptr<Predictor>(
    const config::Section& model, const config::Section& data, const std::filesystem::path& run)>;

/// Finds tasks by name. A value type. Const members are thread-safe.
class Registry {
 public:
  /// Replaces an earlier factory of the same names.
  Registry& add(const std::string& data_type, const std::string& model_type, TaskFactory factory);

  /// Makes the task named by these sections. Throws ConfigError for an unknown data.type or
  /// model.type, listing the known ones and the nearest; and what the factory throws (ConfigError,
  /// DataError).
  std::unique_ptr<Task> make(const config::Section& model, const config::Section& data,
                             const std::filesystem::path& run = {}) const;

  /// The same for predictors.
  Registry& add_predictor(const std::string& data_type, const std::string& model_type,
                          PredictorFactory factory);
  /// Throws as make(), and ConfigError for a task without a predictor.
  std::unique_ptr<Predictor> make_predictor(const config::Section& model, const config::Section& data,
                                            const std::filesystem::path& run) const;

 private:
  template <class Factory>
  using ByType = std::map<std::string, std::map<std::string, Factory>>;  // data.type -> model.type -> factory

  ByType<TaskFactory> tasks_;
  ByType<PredictorFactory> predictors_;
};

}  // namespace tessera::train
