#include "train/task/registry.h"

#include <utility>
#include <vector>

#include "core/str.h"
#include "engine/config/document/suggest.h"

namespace tessera::train {
namespace {

/// The entry of `table` named by the section's `type`.
template <class Table>
const auto& find(const Table& table, const config::Section& section, const std::string& what,
                 const std::string& where) {
  const std::string type = section.required_text("type");
  if (const auto found = table.find(type); found != table.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [name, entry] : table) known.push_back(name);
  section.fail("type", str("unknown ", what, " \"", type, "\"", where, config::did_you_mean(type, known),
                           "; known: ", join(known, ", ")));
}

/// The factory of data.type and model.type.
template <class Table>
const auto& find(const Table& table, const config::Section& model, const config::Section& data,
                 const std::string& what) {
  if (model.json().empty() && data.json().empty())
    data.fail("type",
              "is missing, as are the sections model and data: a configuration without them is for a "
              "program's own loop (tessera.initialize()); expected both here. What its stages cost: `tessera "
              "memory --estimate --params P`, or tessera.estimate() in Python");
  const auto& models = find(table, data, "data set", what);
  return find(models, model, "model", str(" for data.type \"", data.required_text("type"), "\"", what));
}

}  // namespace

Registry& Registry::add(const std::string& data_type, const std::string& model_type, TaskFactory factory) {
  tasks_[data_type][model_type] = std::move(factory);
  return *this;
}

Registry& Registry::add_predictor(const std::string& data_type, const std::string& model_type,
                                  PredictorFactory factory) {
  predictors_[data_type][model_type] = std::move(factory);
  return *this;
}

std::unique_ptr<Task> Registry::make(const config::Section& model, const config::Section& data,
                                     const std::filesystem::path& run) const {
  std::unique_ptr<Task> task = find(tasks_, model, data, "")(model, data, run);
  model.finish();
  data.finish();
  return task;
}

std::unique_ptr<Predictor> Registry::make_predictor(const config::Section& model, const config::Section& data,
                                                    const std::filesystem::path& run) const {
  std::unique_ptr<Predictor> predictor = find(predictors_, model, data, " to predict with")(model, data, run);
  model.finish();
  data.finish();
  return predictor;
}

}  // namespace tessera::train
