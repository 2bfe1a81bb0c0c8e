// The keys of the learning-rate schedules, which depend on scheduler.type.
#include <algorithm>

#include "engine/config/keys.h"

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
      "Our own key: the warm-up as a part of the run's steps, rounded up, in place of `warmup_num_steps`",
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
      {"cycle_min_mom", &o.cycle_min_mom, "Lowest momentum", between(0, 1)},
      {"cycle_max_mom", &o.cycle_max_mom, "Highest momentum", between(0, 1)},
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

}  // namespace tessera::config
