// Every schedule against the rates of the original implementation, in lr_schedules.json: row "k" of "rates"
// and "beta1" holds what the optimizer has when its step k (from 0) is taken, one number for all param groups
// or one for each. DeepSpeed's were written by running the classes of DeepSpeed 0.19.8's
// deepspeed/runtime/lr_schedules.py as its engine does (construct, then step() after each applied optimizer
// step), those of StepLR and CosineAnnealingLR by torch 2.11.0's torch/optim/lr_scheduler.py. What more of
// DeepSpeed's rates its own class names give: tests/python/deepspeed_schedules.json.
#include "engine/optimizer/lr_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "engine/config/parse.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// As from a configuration's file.
ScheduleOptions make_config(const std::string& type, const json& params, size_t num_groups = 1) {
  json config = {{"train_batch_size", 1}, {"scheduler", {{"type", type}, {"params", params}}}};
  for (size_t i = 1; i < num_groups; ++i) config["optimizer"]["param_groups"].push_back({{"match", "x"}});
  return parse_engine_config(config.dump()).scheduler;
}

// Rates that are zero by cancellation get the absolute part; both are far below what a wrong formula would
// give.
void expect_near(double found, double expected) {
  EXPECT_NEAR(found, expected, 1e-12 * std::abs(expected) + 1e-18);
}

TEST(LrSchedule, RatesAndMomentumAreThoseOfTheOriginals) {
  std::ifstream file(TESSERA_SOURCE_DIR "/tests/engine/optimizer/lr_schedules.json");
  std::set<std::string> types;
  for (const json& row : json::parse(file)) {
    const std::vector<double> base = row["base"];
    const LrSchedule schedule(make_config(row["type"], row["params"], base.size()), base,
                              row.value("steps_per_epoch", 0));
    ASSERT_EQ(schedule.num_groups(), base.size());
    types.insert(row["type"]);
    const auto check = [&](const char* what, const auto& value_of) {
      const json table = row.value(what, json::object());
      for (const auto& [step, values] : table.items()) {
        SCOPED_TRACE(row["type"].get<std::string>() + ", " + row["name"].get<std::string>() + ", " + what +
                     " at step " + step);
        for (size_t group = 0; group < base.size(); ++group)
          expect_near(value_of(std::stoll(step), group), values.is_array()
                                                             ? values.at(group).template get<double>()
                                                             : values.template get<double>());
      }
    };
    check("rates", [&](int64_t step, size_t group) { return schedule.lr(step, group); });
    EXPECT_EQ(schedule.betas(3).has_value(),
              row["type"] == "OneCycle" && row["params"].value("cycle_momentum", true));
    check("beta1", [&](int64_t step, size_t group) {
      const auto betas = schedule.betas(step, group);
      EXPECT_TRUE(betas.has_value());
      EXPECT_EQ(betas.value_or(Betas{}).beta2, 0.99);
      return betas.value_or(Betas{}).beta1;
    });
  }
  for (const ScheduleOptions& options : all_types<ScheduleOptions>())
    EXPECT_TRUE(type_of(options).empty() || types.contains(type_of(options))) << type_of(options);
}

TEST(LrSchedule, NoneIsConstant) {
  const LrSchedule schedule(ConstantLrOptions{}, {0.1, 0.2});
  for (const int64_t step : {0, 1'000'000}) {
    EXPECT_EQ(schedule.lr(step, 0), 0.1);
    EXPECT_EQ(schedule.lr(step, 1), 0.2);
  }
  EXPECT_FALSE(schedule.betas(0).has_value());
}

TEST(LrSchedule, CosineAnnealingLrCountsEpochs) {
  const LrSchedule epochs(make_config("CosineAnnealingLR", {{"T_max", 5}, {"interval", "epoch"}}), {0.1},
                          /*steps_per_epoch=*/10);
  EXPECT_EQ(epochs.lr(19), epochs.lr(10));
  EXPECT_LT(epochs.lr(20), epochs.lr(19));
}

TEST(LrSchedule, CopiesShareOneDefinition) {
  LrSchedule copy(ConstantLrOptions{}, {1.0});
  {
    const LrSchedule original(make_config("LRRangeTest", json::object()), {0.1});
    copy = original;
  }
  EXPECT_EQ(copy.lr(2000), 0.002);
}

std::string schedule_error(const std::string& type, const json& params, size_t num_groups = 1,
                           int64_t steps_per_epoch = 0) {
  return testing::error_of<ConfigError>([&] {
    LrSchedule(make_config(type, params, num_groups), std::vector<double>(num_groups, 0.1), steps_per_epoch);
  });
}

TEST(LrSchedule, ErrorsNameTheKey) {
  struct Wrong {
    const char* type;
    json params;
    std::vector<const char*> parts;  // none: it is right
    size_t num_groups = 1;
    int64_t steps_per_epoch = 0;
  };
  const json one_cycle = {{"cycle_min_lr", 1e-4}, {"cycle_max_lr", 1e-3}, {"cycle_momentum", "2"}};
  for (const Wrong& wrong : std::vector<Wrong>{
           {"WarmupRL", json::object(), {"scheduler.type", "\"WarmupLR\", \"WarmupDecayLR\""}},
           {"WarmupLR",
            {{"warmup_steps", 10}},
            {"scheduler.params.warmup_steps: unknown key", "warmup_num_steps"}},
           {"WarmupLR",
            {{"warmup_num_steps", -1}},
            {"scheduler.params.warmup_num_steps", "found -1", "an integer from 0"}},
           {"WarmupLR", {{"warmup_num_steps", 2.5}}, {"an integer"}},
           {"WarmupLR", {{"warmup_num_steps", "ten"}}, {"expected an integer"}},
           {"WarmupLR", {{"warmup_type", "cosine"}}, {"scheduler.params.warmup_type", "\"log\", \"linear\""}},
           {"WarmupLR", {{"warmup_type", 1}}, {"\"log\", \"linear\""}},
           {"WarmupLR", {{"warmup_max_lr", {1, 2, 3}}}, {"one number, or 2"}, 2},
           {"WarmupLR", {{"warmup_ratio", 0.1}}, {"scheduler.params.warmup_ratio"}},
           {"WarmupDecayLR", json::object(), {"scheduler.params.total_num_steps: is missing"}},
           {"OneCycle", {{"cycle_min_lr", 1}}, {"scheduler.params.cycle_max_lr: is missing"}},
           {"OneCycle", one_cycle, {"true or false"}},
           {"LRRangeTest", {{"last_batch_iteration", 10}}, {"or -1"}},
           {"LRRangeTest", {{"last_batch_iteration", -1}}, {}},
           {"StepLR", {{"step_size", 3}, {"interval", "epoch"}}, {"scheduler.params.interval"}},
           {"StepLR", {{"step_size", 3}, {"last_epoch", -1}}, {}, 1, 10}}) {
    const std::string said =
        schedule_error(wrong.type, wrong.params, wrong.num_groups, wrong.steps_per_epoch);
    EXPECT_EQ(said.empty(), wrong.parts.empty()) << wrong.params << said;
    for (const char* part : wrong.parts) EXPECT_THAT(said, HasSubstr(part)) << wrong.params;
  }
}

}  // namespace
}  // namespace tessera
