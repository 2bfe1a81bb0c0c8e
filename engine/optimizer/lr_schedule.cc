#include "engine/optimizer/lr_schedule.h"

#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "engine/optimizer/lr_formulas.h"

namespace tessera {

void schedule::fail(const char* type, const char* key, const char* problem) {
  throw ConfigError("scheduler.params.", key, ": ", problem, " (scheduler.type is ", type, ")");
}

schedule::Rates schedule::Groups::each(const PerGroup& values) const {
  TESSERA_CHECK(values.size() == 1 || values.size() == base_lrs.size());
  return values.size() == 1 ? Rates(base_lrs.size(), values[0]) : values;
}

LrSchedule::LrSchedule(const ScheduleOptions& options, std::vector<double> base_lrs, int64_t steps_per_epoch)
    : num_groups_(base_lrs.size()) {
  TESSERA_CHECK(!base_lrs.empty());
  const schedule::Groups groups{std::move(base_lrs), steps_per_epoch};
  formula_ = std::visit([&](const auto& one) { return schedule::make_formula(one, groups); }, options);
}

double LrSchedule::lr(int64_t num_steps, size_t group) const {
  TESSERA_CHECK(num_steps >= 0 && group < num_groups_);
  return formula_->lr(num_steps, group);
}

std::optional<Betas> LrSchedule::betas(int64_t num_steps, size_t group) const {
  TESSERA_CHECK(num_steps >= 0 && group < num_groups_);
  return formula_->betas(num_steps, group);
}

}  // namespace tessera
