#include "train/report/monitoring.h"

#include <nlohmann/json.hpp>

#include "core/str.h"
#include "monitor/csv_monitor.h"
#include "monitor/jsonl_monitor.h"
#include "monitor/mlflow_monitor.h"
#include "monitor/tensorboard_monitor.h"

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

/// The folder of a monitor that writes files: output_path/job_name, as in DeepSpeed. An empty output_path is
/// RUN_FOLDER/SECTION. An empty job_name is the last part of the run's folder, or nothing when output_path is
/// empty too.
std::filesystem::path monitor_folder(const FileMonitorConfig& config, std::string_view section,
                                     const MonitoredRun& run) {
  if (config.output_path.empty()) return run.folder / section / config.job_name;
  if (!config.job_name.empty()) return std::filesystem::path(config.output_path) / config.job_name;
  const std::string last =
      run.folder.filename().string();  // so that runs with different folders do not share one here
  return std::filesystem::path(config.output_path) /
         (last.empty() || last == "." || last == ".." ? run.name : last);
}

MlflowOptions mlflow_options(const MlflowConfig& config, const MonitoredRun& run) {
  MlflowOptions options;
  options.server = config.tracking_uri;
  options.experiment = config.experiment_name;
  options.run_name = config.run_name.empty() ? run.name : config.run_name;
  if (!run.folder.empty()) options.id_file = run.folder / kMlflowRunIdName;
  options.resume = run.resumed_after.has_value();
  options.log = run.log;
  return options;
}

MonitoredRun monitored(const RunConfig& run) {
  return {
      .name = run.trainer.name, .folder = run.trainer.output_dir, .resumed_after = std::nullopt, .log = {}};
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
  const MonitorConfig& monitors = run.engine.monitors;
  std::vector<std::filesystem::path> paths;
  for (const auto& [config, section] : {std::pair{&monitors.tensorboard, "tensorboard"},
                                        {&monitors.csv, "csv_monitor"},
                                        {&monitors.jsonl, "jsonl_monitor"}})
    if (config->enabled) paths.push_back(monitor_folder(*config, section, monitored(run)));
  if (monitors.mlflow.enabled) paths.push_back(monitored(run).folder / kMlflowRunIdName);
  return paths;
}

Monitors open_monitors(const MonitorConfig& config, const MonitoredRun& run) {
  Monitors monitors(run.log);
  if (!run.resumed_after) {
    try {
      forget_mlflow_run(run.folder);
    } catch (const std::exception& error) {
      run.log.warning(str("mlflow: ", error.what()));
    }
  }
  const auto open = [&](const FileMonitorConfig& section, const char* name, const auto& make) {
    if (section.enabled) monitors.open(name, [&] { return make(monitor_folder(section, name, run)); });
  };
  open(config.tensorboard, "tensorboard", [&](const std::filesystem::path& folder) {
    return std::make_unique<TensorboardMonitor>(folder, run.resumed_after);
  });
  open(config.csv, "csv_monitor", [&](const std::filesystem::path& folder) {
    return std::make_unique<CsvMonitor>(folder, run.resumed_after, run.log);
  });
  open(config.jsonl, "jsonl_monitor", [&](const std::filesystem::path& folder) {
    return std::make_unique<JsonlMonitor>(folder, run.resumed_after, run.log);
  });
  if (config.mlflow.enabled)
    monitors.open("mlflow",
                  [&] { return std::make_unique<MlflowMonitor>(mlflow_options(config.mlflow, run)); });
  return monitors;
}

Monitors open_monitors(const RunConfig& run, std::optional<int64_t> resumed_after, const Logger& log) {
  MonitoredRun one = monitored(run);
  one.resumed_after = resumed_after;
  one.log = log;
  Monitors monitors = open_monitors(run.engine.monitors, one);
  if (!monitors.empty()) monitors.params(resolved(run));
  return monitors;
}

}  // namespace tessera::train
