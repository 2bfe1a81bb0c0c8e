// The optimizer and scheduler sections, whose keys depend on the type. For .cc files only.
#pragma once

#include <nlohmann/json.hpp>

#include "engine/config/check.h"
#include "engine/config/config.h"

namespace tessera::config {

/// Local. The sections of a checked document. Throws ConfigError where two values contradict each other.
OptimizerConfig read_optimizer(const Document& document, const KeyTable& table, Report* report);
SchedulerConfig read_scheduler(const Document& document, const KeyTable& table,
                               const OptimizerConfig& optimizer, Report* report);

/// Local. The sections as JSON, with every key of the type filled in.
nlohmann::ordered_json write_optimizer(const OptimizerConfig& optimizer, const KeyTable& table);
nlohmann::ordered_json write_scheduler(const SchedulerConfig& scheduler, const KeyTable& table);

}  // namespace tessera::config
