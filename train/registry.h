// Registry: tasks by the names a configuration uses, data.type and model.type.
//
// There is no global table and no registration at load time: whoever needs tasks builds a Registry and adds them
// (tools/ adds the examples; a program of your own adds its own).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/config/section.h"
#include "train/task.h"

namespace tessera::train {

/// Builds a task from the sections `model` and `data`. Reads the options first, calls finish() on both sections, and only
/// then loads data, so that a typing mistake is found at once.
using TaskFactory = std::function<std::unique_ptr<Task>(const config::Section& model, const config::Section& data)>;

/// A value. Reading it is thread-safe.
class Registry {
 public:
  /// Local. A later factory of the same names replaces an earlier one.
  Registry& add(const std::string& data_type, const std::string& model_type, TaskFactory factory);

  /// Local. The task these sections ask for. Throws ConfigError for an unknown data.type or model.type, with the known
  /// ones and the nearest; and whatever the factory throws (ConfigError, DataError).
  std::unique_ptr<Task> make(const config::Section& model, const config::Section& data) const;

 private:
  std::map<std::string, std::map<std::string, TaskFactory>> factories_;  // data.type -> model.type -> factory
};

}  // namespace tessera::train
