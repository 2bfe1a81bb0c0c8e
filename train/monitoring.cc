#include "train/monitoring.h"

#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/monitor/mlflow_monitor.h"

namespace tessera::train {
namespace {

using nlohmann::ordered_json;

/// "eval" of "eval_accuracy", "test" of "test_accuracy"; else "".
std::string evaluation_of(const std::string& name) {
  for (const char* set : {"eval", "test"})
    if (name.starts_with(str(set, "_"))) return set;
  return "";
}

void add(const ordered_json& section, const std::string& prefix, Scalars& scalars) {
  for (const auto& [name, value] : section.items()) {
    const std::string set = evaluation_of(name);
    const std::string plain = set.empty() ? name : name.substr(set.size() + 1);
    if (value.is_object()) add(value, prefix + plain + "/", scalars);
    if (value.is_number()) scalars.emplace_back(prefix + plain, value.get<double>());
  }
}

}  // namespace

Scalars scalars_of(const ordered_json& record) {
  ordered_json numbers = record;
  numbers.erase("step");
  std::string kind = "train";
  for (const auto& item : numbers.items())
    if (const std::string set = evaluation_of(item.key()); !set.empty()) kind = set;
  Scalars scalars;
  add(numbers, kind + "/", scalars);
  return scalars;
}

std::vector<std::filesystem::path> monitor_paths(const RunConfig& run) {
  const MonitoredRun monitored{
      .name = run.trainer.name, .folder = run.trainer.output_dir, .resumed_after = std::nullopt, .log = {}};
  const MonitorConfig& monitors = run.engine.monitors;
  std::vector<std::filesystem::path> paths;
  for (const auto& [config, section] : {std::pair{&monitors.tensorboard, "tensorboard"},
                                        {&monitors.csv, "csv_monitor"},
                                        {&monitors.jsonl, "jsonl_monitor"}})
    if (config->enabled) paths.push_back(monitor_folder(*config, section, monitored));
  if (monitors.mlflow.enabled) paths.push_back(monitored.folder / kMlflowRunIdName);
  return paths;
}

Monitors open_monitors(const RunConfig& run, std::optional<int64_t> resumed_after, const Logger& log) {
  Monitors monitors(run.engine.monitors, {.name = run.trainer.name,
                                          .folder = run.trainer.output_dir,
                                          .resumed_after = resumed_after,
                                          .log = log});
  if (!monitors.empty()) monitors.params(resolved(run));
  return monitors;
}

}  // namespace tessera::train
