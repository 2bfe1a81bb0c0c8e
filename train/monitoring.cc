#include "train/monitoring.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera::train {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kEvaluation = "eval_";

void add(const ordered_json& section, const std::string& prefix, Scalars& scalars) {
  for (const auto& [name, value] : section.items()) {
    const std::string plain = name.starts_with(kEvaluation) ? name.substr(kEvaluation.size()) : name;
    if (value.is_object()) add(value, prefix + plain + "/", scalars);
    if (value.is_number()) scalars.emplace_back(prefix + plain, value.get<double>());
  }
}

}  // namespace

Scalars scalars_of(const ordered_json& record) {
  ordered_json numbers = record;
  numbers.erase("step");
  const auto items = numbers.items();
  const bool is_evaluation = std::any_of(items.begin(), items.end(), [](const auto& item) { return item.key().starts_with(kEvaluation); });
  Scalars scalars;
  add(numbers, is_evaluation ? "eval/" : "train/", scalars);
  return scalars;
}

Monitors open_monitors(const RunConfig& run, std::optional<int64_t> resumed_after, const Logger& log) {
  Monitors monitors(run.engine.monitors,
                    {.name = run.trainer.name, .folder = run.trainer.output_dir, .resumed_after = resumed_after, .log = log});
  if (!monitors.empty()) monitors.params(ordered_json::parse(dump_resolved(run)));
  return monitors;
}

}  // namespace tessera::train
