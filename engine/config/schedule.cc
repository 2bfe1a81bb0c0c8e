// The section `scheduler`.
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/config/keys.h"
#include "engine/config/optimizer.h"

namespace tessera::config {

using nlohmann::json;
using nlohmann::ordered_json;

ScheduleOptions read_schedule(const Document& document, ConfigReport* report) {
  const json& root = *document.json;
  const json* type = value_at(root, "scheduler.type");
  if (!type || !type->is_string()) return ConstantLrOptions{};
  ScheduleOptions schedule = *options_named<ScheduleOptions>(type->get<std::string>());
  read_fields(fields_of(schedule), document, report);
  const auto* total = total_num_steps_of(schedule);
  const WarmupOptions* warmup = warmup_of(schedule);
  if (warmup && warmup->ratio && value_at(root, "scheduler.params.warmup_num_steps"))
    document.origins.fail("scheduler.params.warmup_ratio",
                          str("found ", *warmup->ratio, " beside warmup_num_steps; expected one of the two"));
  if (report && total && *total && !warmup->ratio && **total < warmup->num_steps)
    report->warnings.push_back(str(document.origins.where("scheduler.params.total_num_steps"),
                                   ": scheduler.params.total_num_steps ", **total,
                                   " is less than warmup_num_steps ", warmup->num_steps,
                                   ": the run ends before the warm-up does"));
  // DeepSpeed's default, unlike that of other schedules, which scale the optimizer's lr.
  const json* lr = value_at(root, "optimizer.params.lr");
  if (report && std::holds_alternative<WarmupDecayLrOptions>(schedule) && lr && lr->is_number() &&
      *lr != 0.001 && !value_at(root, "scheduler.params.warmup_max_lr"))
    report->warnings.push_back(str(
        document.origins.where("optimizer.params.lr"), ": optimizer.params.lr ", lr->get<double>(),
        " is not used: WarmupDecayLR rises to scheduler.params.warmup_max_lr, which is 0.001 where it is not "
        "given; \"auto\" there takes the optimizer's"));
  return schedule;
}

ordered_json write_schedule(const ScheduleOptions& given) {
  ScheduleOptions schedule = given;
  ordered_json out;
  const std::string type = type_of(schedule);
  out["type"] = type.empty() ? ordered_json(nullptr) : ordered_json(type);
  const WarmupOptions* warmup = warmup_of(schedule);
  for (const Field& field : fields_of(schedule))
    if (!(warmup && warmup->ratio && field.key.name() == "warmup_num_steps"))
      out["params"][field.key.name()] = value_of(field);
  return out;
}

void check_fields(ScheduleOptions& schedule, Origins& origins, Problems& problems) {
  for (const Field& field : fields_of(schedule))
    check_field(field, field.key.path, origins, problems, type_of(schedule));
}

void check_together(ScheduleOptions schedule, size_t num_groups, const Origins& origins) {
  for (const Field& field : fields_of(schedule)) {
    const auto* const* list = std::get_if<PerGroup*>(&field.target);
    if (!list || (*list)->size() <= 1 || (*list)->size() == num_groups) continue;
    origins.fail(field.key.path,
                 str("found [", join(**list, ","), "] (a list) with ", (*list)->size(),
                     " values; expected one number, or ", num_groups,
                     ": one for the parameters in no group, then one for each of optimizer.param_groups"));
  }
}

}  // namespace tessera::config
