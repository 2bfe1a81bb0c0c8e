// What a training run tells its monitors (monitor/monitors.h), and which those are.
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
#include "train/trainer_config.h"

namespace tessera::train {

/// The run that is monitored.
struct MonitoredRun {
  std::string name;              ///< where the configuration gives no job_name or run_name
  std::filesystem::path folder;  ///< where it gives no output_path
  /// The run is resumed after this step: records of later steps are removed. Unset: it is a new run, which
  /// replaces an earlier one recorded in the same folder.
  std::optional<int64_t> resumed_after;
  Logger log;
};

/// Local. A record of metrics.jsonl under the names Hugging Face's Trainer gives to TensorBoard: {"loss": …}
/// is train/loss and {"eval_accuracy": …} eval/accuracy, {"test_accuracy": …} test/accuracy; an evaluation's
/// "epoch" is eval/epoch; numbers in a section are train/SECTION/NAME. Without the step.
Scalars scalars_of(const nlohmann::ordered_json& record);

/// Local. The monitors that a configuration enables. For rank 0. Does not throw: a monitor that cannot be
/// opened is left out, with a warning.
Monitors open_monitors(const MonitorConfig& config, const MonitoredRun& run);

/// Local. The same for a run of `tessera train`; the monitors get the resolved configuration.
/// `resumed_after`: the step after which the run is resumed.
Monitors open_monitors(const RunConfig& run, std::optional<int64_t> resumed_after, const Logger& log);

/// Local. Where those of the configuration's monitors that write files have them.
std::vector<std::filesystem::path> monitor_paths(const RunConfig& run);

}  // namespace tessera::train
