// Opens the monitors of a training run (monitor/monitors.h) and names the values they get.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/log.h"
#include "engine/config/config.h"
#include "monitor/monitors.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

/// The run that is monitored.
struct MonitoredRun {
  std::string name;              ///< used when the configuration has no job_name or run_name
  std::filesystem::path folder;  ///< used when it has no output_path
  /// The step after which the run is resumed: records of later steps are removed. Unset: a new run, which
  /// replaces an earlier one recorded in the same folder.
  std::optional<int64_t> resumed_after;
  Logger log;
};

/// The scalars of a record of metrics.jsonl, without its step, under the names Hugging Face's Trainer
/// uses in TensorBoard: "loss" becomes train/loss, "eval_accuracy" eval/accuracy, "test_accuracy"
/// test/accuracy, "epoch" in an evaluation's record eval/epoch, and NAME in an object SECTION
/// train/SECTION/NAME.
Scalars scalars_of(const nlohmann::ordered_json& record);

/// Is called on rank 0. Opens the monitors that a configuration enables. A monitor that cannot be opened is
/// left out, with a warning. Throws ConfigError where one can never be: MLflow's library is not installed.
Monitors open_monitors(const MonitorConfig& config, const MonitoredRun& run);

/// The same for a run of `tessera train`; the monitors get the resolved configuration.
/// `resumed_after`: the step after which the run is resumed.
Monitors open_monitors(const RunConfig& run, std::optional<int64_t> resumed_after, const Logger& log);

/// The files and folders of the configuration's monitors, for those that write files.
std::vector<std::filesystem::path> monitor_paths(const RunConfig& run);

}  // namespace tessera::train
