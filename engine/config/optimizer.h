// The sections `optimizer` and `scheduler`, whose keys depend on their type.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/config/check.h"
#include "engine/config/config.h"

namespace tessera::config {

/// The options of every param group: [0] for parameters in no group, then one for each of
/// param_groups.
std::vector<OptimizerOptions> group_options(const OptimizerConfig& optimizer);

/// The params of a param group with `options`, beside an optimizer with options `base` of the same
/// type: those that differ.
std::map<std::string, double> changed_options(OptimizerOptions base, OptimizerOptions options);

/// Where a param group that another program has saved has other values than one with `options`: lines such as
/// "weight_decay: it was 0.1, and is 0.01". `saved`: as in the state_dict of torch's or DeepSpeed's
/// optimizers. A rate counts only where `saved` has the one that a schedule begins with, initial_lr, or the
/// source has no schedule.
std::vector<std::string> differing_values(OptimizerOptions options, const nlohmann::json& saved,
                                          bool has_schedule);

/// The sections of a checked document. read_schedule throws KeyError where two keys contradict each
/// other.
OptimizerConfig read_optimizer(const Document& document, ConfigReport* report);
ScheduleOptions read_schedule(const Document& document, ConfigReport* report);

/// The sections as JSON, with every key of the type filled in.
nlohmann::ordered_json write_optimizer(const OptimizerConfig& optimizer);
nlohmann::ordered_json write_schedule(const ScheduleOptions& schedule);

/// Checks every field, as check() does every key of a document.
void check_fields(OptimizerConfig& optimizer, Origins& origins, Problems& problems);
void check_fields(ScheduleOptions& schedule, Origins& origins, Problems& problems);

/// What no single key can tell. Throws KeyError.
void check_together(const OptimizerConfig& optimizer, const Origins& origins);
void check_together(ScheduleOptions schedule, size_t num_groups, const Origins& origins);

}  // namespace tessera::config
