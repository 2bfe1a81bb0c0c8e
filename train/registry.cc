#include "train/registry.h"

#include <utility>
#include <vector>

#include "core/str.h"
#include "engine/config/suggest.h"

namespace tessera::train {
namespace {

// The entry of `table` that section.type names.
template <class Table>
const auto& find(const Table& table, const config::Section& section, const std::string& what, const std::string& where) {
  const std::string type = section.required_text("type");
  if (const auto found = table.find(type); found != table.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [name, entry] : table) known.push_back(name);
  section.fail("type", str("unknown ", what, " \"", type, "\"", where, config::did_you_mean(type, known), "; known: ",
                           join(known, ", ")));
}

}  // namespace

Registry& Registry::add(const std::string& data_type, const std::string& model_type, TaskFactory factory) {
  factories_[data_type][model_type] = std::move(factory);
  return *this;
}

std::unique_ptr<Task> Registry::make(const config::Section& model, const config::Section& data) const {
  const auto& models = find(factories_, data, "data set", "");
  const TaskFactory& factory = find(models, model, "model", str(" for data.type \"", data.required_text("type"), "\""));
  std::unique_ptr<Task> task = factory(model, data);
  model.finish();
  data.finish();
  return task;
}

}  // namespace tessera::train
