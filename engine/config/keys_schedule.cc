// The section `scheduler`: its keys, which depend on scheduler.type, and how it is read, checked and written.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/config/keys.h"
#include "engine/config/optimizer.h"

namespace tessera::config {
namespace {

constexpr double kMaxSteps = 1e15;

Field total_num_steps(std::optional<int64_t>& value) {
  return {"total_num_steps", &value, "Optimizer steps of the whole schedule", between(1, kMaxSteps),
          auto_is("\"auto\"", "the steps of the run")};
}

Field min_lr(PerGroup& value) {
  return {"warmup_min_lr", &value, "Learning rate at the start", at_least(0), kAutoIsDefault};
}

Field max_lr(PerGroup& value) {
  return Field("warmup_max_lr", &value, "Learning rate after the warm-up; null: the optimizer's lr",
               at_least(0), auto_is("null", "the optimizer's lr"), kNullable);
}

/// `fields`, then those of the warm-up.
std::vector<Field> with_warmup(std::vector<Field> fields, WarmupOptions& o) {
  fields.emplace_back("warmup_num_steps", &o.num_steps,
                      "Steps of the warm-up; less than 2 counts as 2, as in DeepSpeed", between(0, kMaxSteps),
                      auto_is("0"));
  fields.emplace_back(
      "warmup_ratio", &o.ratio,
      "Our own key: the warm-up as a part of the run's steps, rounded up; replaces `warmup_num_steps`",
      between(0, 1), kNullable);
  fields.emplace_back("warmup_type", &o.type, "Shape of the warm-up", choices({"log", "linear"}),
                      kAutoIsDefault);
  return fields;
}

std::vector<Field> fields(ConstantLrOptions&) { return {}; }

std::vector<Field> fields(WarmupLrOptions& o) {
  return with_warmup({min_lr(o.warmup_min_lr), max_lr(o.warmup_max_lr)}, o.warmup);
}

std::vector<Field> fields(WarmupDecayLrOptions& o) {
  return with_warmup({total_num_steps(o.total_num_steps), min_lr(o.warmup_min_lr), max_lr(o.warmup_max_lr)},
                     o.warmup);
}

std::vector<Field> fields(WarmupCosineLrOptions& o) {
  return with_warmup({total_num_steps(o.total_num_steps),
                      {"warmup_min_ratio", &o.warmup_min_ratio,
                       "Start of the warm-up, as a part of the optimizer's lr", between(0, 1)},
                      {"cos_min_ratio", &o.cos_min_ratio,
                       "End of the cosine, as a part of the optimizer's lr", between(0, 1)}},
                     o.warmup);
}

std::vector<Field> fields(OneCycleOptions& o) {
  const Attribute rate = at_least(0), count = between(0, kMaxSteps);
  return {
      {"cycle_min_lr", &o.cycle_min_lr, "Learning rate at both ends of the cycle", rate, kRequired},
      {"cycle_max_lr", &o.cycle_max_lr, "Learning rate in the middle of the cycle", rate, kRequired},
      {"decay_lr_rate", &o.decay_lr_rate, "Decay of the learning rate after the cycle", rate},
      {"cycle_first_step_size", &o.cycle_first_step_size, "Steps of the rising half", between(1, kMaxSteps)},
      {"cycle_second_step_size", &o.cycle_second_step_size, "Steps of the falling half; null: as the first",
       count, kNullable},
      {"cycle_first_stair_count", &o.cycle_first_stair_count, "Stairs of the rising half; 0: no stairs",
       count},
      {"cycle_second_stair_count", &o.cycle_second_stair_count,
       "Stairs of the falling half; null: as the first", count, kNullable},
      {"decay_step_size", &o.decay_step_size, "Steps between decays after the cycle; 0: no decay", count},
      {"cycle_momentum", &o.cycle_momentum, "Cycles the momentum (beta1) against the learning rate"},
      {"cycle_min_mom", &o.cycle_min_mom, "Lowest momentum", from_to_below(0, 1)},
      {"cycle_max_mom", &o.cycle_max_mom, "Highest momentum", from_to_below(0, 1)},
      {"decay_mom_rate", &o.decay_mom_rate, "Decay of the momentum after the cycle", rate},
  };
}

std::vector<Field> fields(LrRangeTestOptions& o) {
  return {
      {"lr_range_test_min_lr", &o.lr_range_test_min_lr, "Learning rate at the start", at_least(0)},
      {"lr_range_test_step_size", &o.lr_range_test_step_size, "Steps between two increases",
       between(1, kMaxSteps)},
      {"lr_range_test_step_rate", &o.lr_range_test_step_rate,
       "Increase for each interval, as a part of the start", at_least(0)},
      {"lr_range_test_staircase", &o.lr_range_test_staircase, "Increases in stairs, not at every step"},
  };
}

Field interval(std::string& value) {
  return {"interval", &value,
          "Our own key: what step_size and T_max count. DeepSpeed steps torch's schedulers at every "
          "optimizer step",
          choices({"epoch", "step"})};
}

std::vector<Field> fields(StepLrOptions& o) {
  return {interval(o.interval),
          {"step_size", &o.step_size, "Intervals between two decays", between(1, kMaxSteps), kRequired},
          {"gamma", &o.gamma, "Factor of each decay", at_least(0)}};
}

std::vector<Field> fields(CosineAnnealingLrOptions& o) {
  return {interval(o.interval),
          {"T_max", &o.T_max, "Intervals from the highest to the lowest learning rate", between(1, kMaxSteps),
           kRequired},
          {"eta_min", &o.eta_min, "Lowest learning rate", at_least(0)}};
}

}  // namespace

std::vector<Field> fields_of(ScheduleOptions& schedule) {
  return in_section("scheduler.params", std::visit([](auto& o) { return fields(o); }, schedule));
}

std::vector<Key> schedule_keys() {
  Key type = make_key(Type::kChoice, "scheduler.type",
                      "The schedule; null or left out: a constant learning rate", kNullable);
  std::vector<std::pair<std::string, std::vector<Key>>> types;
  for (ScheduleOptions& schedule : all_types<ScheduleOptions>()) {
    if (std::holds_alternative<ConstantLrOptions>(schedule)) continue;
    types.emplace_back(type_of(schedule), keys_of(fields_of(schedule)));
    type.choices.push_back(types.back().first);
  }
  Key params = make_key(Type::kSection, "scheduler.params",
                        "The schedule's parameters; which ones depends on the type");
  params.type_key = "scheduler.type";
  std::vector<Key> keys = {
      make_key(Type::kSection, "scheduler", "Learning-rate schedule, stepped once for every optimizer step"),
      type, params};
  std::ranges::move(merged_keys(types), std::back_inserter(keys));
  return keys;
}

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
