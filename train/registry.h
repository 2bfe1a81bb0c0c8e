// Registry: tasks by the names a configuration uses, data.type and model.type.
//
// There is no global table and no registration at load time: whoever needs tasks builds a Registry and adds
// them (tools/ adds the examples; a program of your own adds its own).
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/config/section.h"
#include "train/predictor.h"
#include "train/task.h"

namespace tessera::train {

/// Builds a task from the sections `model` and `data`. Reads the options first, calls finish() on
/// both sections, and only then loads data, so that a typing mistake is found at once. `run`: the
/// folder of the run whose model is evaluated again, which has the task's files(); empty: a model is
/// trained. Throws ConfigError, DataError.
using TaskFactory = std::function<std::unique_ptr<Task>(
    const config::Section& model, const config::Section& data, const std::filesystem::path& run)>;

/// Builds a predictor from the same sections and the folder of the run, which has the task's files() beside
/// the weights. Throws ConfigError, DataError.
using PredictorFactory = std::function<std::unique_ptr<Predictor>(
    const config::Section& model, const config::Section& data, const std::filesystem::path& run)>;

/// A value. Reading it is thread-safe.
class Registry {
 public:
  /// Local. A later factory of the same names replaces an earlier one.
  Registry& add(const std::string& data_type, const std::string& model_type, TaskFactory factory);

  /// Local. The task these sections ask for. Throws ConfigError for an unknown data.type or model.type, with
  /// the known ones and the nearest; and whatever the factory throws (ConfigError, DataError).
  std::unique_ptr<Task> make(const config::Section& model, const config::Section& data,
                             const std::filesystem::path& run = {}) const;

  /// Local. The same for tasks whose trained model answers for single texts.
  Registry& add_predictor(const std::string& data_type, const std::string& model_type,
                          PredictorFactory factory);
  /// Local. Throws as make() does, also for a task without a predictor.
  std::unique_ptr<Predictor> make_predictor(const config::Section& model, const config::Section& data,
                                            const std::filesystem::path& run) const;

 private:
  template <class Factory>
  using ByType = std::map<std::string, std::map<std::string, Factory>>;  // data.type -> model.type -> factory

  ByType<TaskFactory> tasks_;
  ByType<PredictorFactory> predictors_;
};

}  // namespace tessera::train
