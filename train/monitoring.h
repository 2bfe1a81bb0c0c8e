// What a training run tells its monitors (engine/monitor/monitors.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/log.h"
#include "engine/monitor/monitors.h"
#include "train/trainer_config.h"

namespace tessera::train {

/// Local. A record of metrics.jsonl under the names Hugging Face's Trainer gives to TensorBoard: {"loss": …}
/// is train/loss and {"eval_accuracy": …} eval/accuracy, {"test_accuracy": …} test/accuracy; an evaluation's
/// "epoch" is eval/epoch; numbers in a section are train/SECTION/NAME. Without the step.
Scalars scalars_of(const nlohmann::ordered_json& record);

/// Local. The configuration's monitors, told the resolved configuration. For rank 0.
/// `resumed_after`: the step after which the run goes on. Never throws for a monitor's sake: one
/// that cannot be opened is left out, with a warning.
Monitors open_monitors(const RunConfig& run, std::optional<int64_t> resumed_after, const Logger& log);

/// Local. Where those of the configuration's monitors that write files have them.
std::vector<std::filesystem::path> monitor_paths(const RunConfig& run);

}  // namespace tessera::train
