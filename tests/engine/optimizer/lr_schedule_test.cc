// Every schedule against the rates of the original implementation. The DeepSpeed tables were written by
// running the classes of DeepSpeed 0.19.8's deepspeed/runtime/lr_schedules.py as its engine does (construct,
// then step() after each applied optimizer step), those of StepLR and CosineAnnealingLR by torch 2.11.0's
// torch/optim/lr_scheduler.py: row {k, …} holds the optimizer's rates when its step k (from 0) is taken.
#include "engine/optimizer/lr_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/engine/optimizer/lr_schedule_testing.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string schedule_error(const std::string& type, const Params& params, const Choices& choices = {},
                           size_t num_groups = 1, int64_t steps_per_epoch = 0) {
  return testing::error_of<ConfigError>([&] {
    LrSchedule(make_config(type, params, choices, num_groups), std::vector<double>(num_groups, 0.1),
               steps_per_epoch);
  });
}

TEST(LrSchedule, NoneIsConstant) {
  const LrSchedule schedule(ConstantLrOptions{}, {0.1, 0.2});
  expect_rates(schedule, {{0, {0.1, 0.2}}, {1'000'000, {0.1, 0.2}}});
  EXPECT_FALSE(schedule.betas(0).has_value());
}

TEST(LrSchedule, WarmupLrByLogarithm) {
  const auto config = make_config(
      "WarmupLR", {{"warmup_min_lr", {1e-4}}, {"warmup_max_lr", {1e-2}}, {"warmup_num_steps", {10}}});
  expect_rates(LrSchedule(config, {3e-3}), {{0, {0.0001}},
                                            {1, {0.0001}},
                                            {2, {0.0030801969570734135}},
                                            {5, {0.007019803042926586}},
                                            {9, {0.009547000843449316}},
                                            {10, {0.009999999999999998}},
                                            {11, {0.01}},
                                            {50, {0.01}}});
}

TEST(LrSchedule, WarmupLrWithoutMaxRisesToEachGroupsOwnRate) {
  const auto config = make_config("WarmupLR", {{"warmup_num_steps", {10}}}, {{"warmup_type", "linear"}});
  expect_rates(LrSchedule(config, {3e-3, 5e-4}), {{0, {0.0, 0.0}},
                                                  {1, {0.0, 0.0}},
                                                  {2, {0.00030000000000000003, 5e-05}},
                                                  {5, {0.0012000000000000001, 0.0002}},
                                                  {9, {0.0024000000000000002, 0.0004}},
                                                  {10, {0.0027, 0.00045000000000000004}},
                                                  {11, {0.003, 0.0005}},
                                                  {12, {0.003, 0.0005}}});
}

TEST(LrSchedule, WarmupLrTakesAListAndAtLeastTwoSteps) {
  const auto config = make_config(
      "WarmupLR",
      {{"warmup_min_lr", {1e-5, 2e-5}}, {"warmup_max_lr", {1e-2, 2e-2}}, {"warmup_num_steps", {1}}});
  expect_rates(LrSchedule(config, {3e-3, 5e-4}),
               {{0, {1e-05, 2e-05}}, {1, {1e-05, 2e-05}}, {2, {0.01, 0.02}}, {4, {0.01, 0.02}}});
}

TEST(LrSchedule, WarmupDecayLrLinear) {
  const auto config = make_config("WarmupDecayLR",
                                  {{"total_num_steps", {20}},
                                   {"warmup_min_lr", {0.01}},
                                   {"warmup_max_lr", {0.1}},
                                   {"warmup_num_steps", {5}}},
                                  {{"warmup_type", "linear"}});
  expect_rates(LrSchedule(config, {3e-3}), {{0, {0.01}},
                                            {1, {0.01}},
                                            {3, {0.046000000000000006}},
                                            {5, {0.082}},
                                            {6, {0.1}},
                                            {7, {0.094}},
                                            {12, {0.064}},
                                            {20, {0.016}},
                                            {21, {0.01}},
                                            {22, {0.01}},
                                            {40, {0.01}}});
}

TEST(LrSchedule, WarmupDecayLrDefaults) {
  expect_rates(LrSchedule(make_config("WarmupDecayLR", {{"total_num_steps", {1500}}}), {3e-3}),
               {{0, {0.0}},
                {1, {0.0}},
                {2, {0.00010034333188799373}},
                {500, {0.0008996566681120063}},
                {1000, {0.001}},
                {1001, {0.001}},
                {1002, {0.000998}},
                {1250, {0.0005020000000000001}},
                {1500, {2e-06}},
                {1501, {0.0}}});
}

TEST(LrSchedule, WarmupDecayLrShorterThanItsWarmup) {
  expect_rates(
      LrSchedule(make_config("WarmupDecayLR", {{"total_num_steps", {4}}, {"warmup_num_steps", {8}}}), {3e-3}),
      {{0, {0.0}}, {4, {0.0006666666666666668}}, {8, {0.001}}, {9, {0.0}}, {10, {0.0}}});
}

TEST(LrSchedule, WarmupCosineLrLinear) {
  const auto config = make_config("WarmupCosineLR",
                                  {{"total_num_steps", {20}},
                                   {"warmup_min_ratio", {0.1}},
                                   {"warmup_num_steps", {5}},
                                   {"cos_min_ratio", {0.05}}},
                                  {{"warmup_type", "linear"}});
  expect_rates(LrSchedule(config, {3e-3, 1e-3}), {{0, {0.0, 0.0}},
                                                  {1, {0.00030000000000000003, 0.0001}},
                                                  {2, {0.0008400000000000001, 0.00028000000000000003}},
                                                  {5, {0.0024600000000000004, 0.0008200000000000001}},
                                                  {6, {0.002968860331045673, 0.0009896201103485576}},
                                                  {7, {0.002876802277140706, 0.0009589340923802355}},
                                                  {12, {0.0017239530601564062, 0.0005746510200521354}},
                                                  {19, {0.0001811396689543269, 6.0379889651442304e-05}},
                                                  {20, {0.00015000000000000001, 5e-05}},
                                                  {21, {0.00015000000000000001, 5e-05}},
                                                  {40, {0.00015000000000000001, 5e-05}}});
}

TEST(LrSchedule, WarmupCosineLrDefaults) {
  expect_rates(LrSchedule(make_config("WarmupCosineLR", {{"total_num_steps", {1500}}}), {3e-3}),
               {{0, {0.0}},
                {1, {0.0}},
                {2, {0.0003010299956639812}},
                {500, {0.0026989700043360187}},
                {1000, {0.003}},
                {1001, {0.002999970394245077}},
                {1002, {0.0029998815781490935}},
                {1250, {0.00150015}},
                {1499, {3.296057549227476e-07}},
                {1500, {3.0000000000000004e-07}},
                {1501, {3.0000000000000004e-07}}});
}

TEST(LrSchedule, LrRangeTest) {
  Params params = {
      {"lr_range_test_min_lr", {1e-4}}, {"lr_range_test_step_size", {4}}, {"lr_range_test_step_rate", {2}}};
  expect_rates(LrSchedule(make_config("LRRangeTest", params), {0.1}), {{0, {0.0001}},
                                                                       {1, {0.00015000000000000001}},
                                                                       {3, {0.00025}},
                                                                       {4, {0.00030000000000000003}},
                                                                       {8, {0.0005}},
                                                                       {9, {0.00055}}});
  params["lr_range_test_staircase"] = {1};
  expect_rates(LrSchedule(make_config("LRRangeTest", params), {0.1}), {{0, {0.0001}},
                                                                       {3, {0.0001}},
                                                                       {4, {0.00030000000000000003}},
                                                                       {5, {0.00030000000000000003}},
                                                                       {8, {0.0005}},
                                                                       {9, {0.0005}}});
  expect_rates(LrSchedule(make_config("LRRangeTest", {}), {0.1}),
               {{0, {0.001}}, {1, {0.0010004999999999999}}, {100, {0.0010500000000000002}}, {2000, {0.002}}});
}

TEST(LrSchedule, StepLrCountsEpochsOrSteps) {
  const Table by_count = {{0, {0.1, 0.02}},
                          {2, {0.1, 0.02}},
                          {3, {0.05, 0.01}},
                          {5, {0.05, 0.01}},
                          {6, {0.025, 0.005}},
                          {9, {0.0125, 0.0025}},
                          {30, {9.765625e-05, 1.953125e-05}}};
  const Params params = {{"step_size", {3}}, {"gamma", {0.5}}};
  expect_rates(LrSchedule(make_config("StepLR", params), {0.1, 0.02}), by_count);

  Table by_epoch = by_count;
  for (Row& row : by_epoch) row.step *= 100;
  const LrSchedule epochs(make_config("StepLR", params, {{"interval", "epoch"}}), {0.1, 0.02},
                          /*steps_per_epoch=*/100);
  expect_rates(epochs, by_epoch);
  expect_rates(epochs, {{299, {0.1, 0.02}}, {599, {0.05, 0.01}}});

  expect_rates(LrSchedule(make_config("StepLR", {{"step_size", {10}}}), {0.1}, 1),
               {{0, {0.1}}, {9, {0.1}}, {10, {0.010000000000000002}}, {20, {0.0010000000000000002}}});
}

TEST(LrSchedule, CosineAnnealingLrGoesOnBeyondTMax) {
  const auto config = make_config("CosineAnnealingLR", {{"T_max", {5}}, {"eta_min", {0.01}}});
  expect_rates(LrSchedule(config, {0.1, 0.02}), {{0, {0.1, 0.02}},
                                                 {1, {0.09140576474687263, 0.019045084971874737}},
                                                 {2, {0.06890576474687263, 0.016545084971874735}},
                                                 {4, {0.018594235253127367, 0.010954915028125263}},
                                                 {5, {0.01, 0.01}},
                                                 {6, {0.018594235253127367, 0.010954915028125263}},
                                                 {7, {0.04109423525312739, 0.013454915028125266}},
                                                 {10, {0.10000000000000006, 0.020000000000000007}},
                                                 {11, {0.09140576474687272, 0.019045084971874748}},
                                                 {15, {0.01, 0.01}},
                                                 {23, {0.04109423525312742, 0.013454915028125274}}});
  const LrSchedule epochs(make_config("CosineAnnealingLR", {{"T_max", {5}}}, {{"interval", "epoch"}}), {0.1},
                          /*steps_per_epoch=*/10);
  EXPECT_EQ(epochs.lr(19), epochs.lr(10));
  EXPECT_LT(epochs.lr(20), epochs.lr(19));
}

TEST(LrSchedule, CopiesShareOneDefinition) {
  LrSchedule copy(ConstantLrOptions{}, {1.0});
  {
    const LrSchedule original(make_config("LRRangeTest", {}), {0.1});
    copy = original;
  }
  EXPECT_EQ(copy.lr(2000), 0.002);
}

// DeepSpeed's default is 0.001, whatever the optimizer's rate is; "auto" and null mean the optimizer's.
TEST(LrSchedule, WarmupDecayLrWithoutMaxRisesToEachGroupsOwnRate) {
  const LrSchedule schedule(
      make_config("WarmupDecayLR", {{"total_num_steps", {20}}, {"warmup_num_steps", {5}}},
                  {{"warmup_max_lr", "auto"}, {"warmup_type", "linear"}}),
      {3e-3, 5e-4});
  expect_rates(schedule, {{0, {0, 0}}, {2, {0.0006, 0.0001}}, {6, {0.003, 0.0005}}, {21, {0, 0}}});
}

TEST(LrSchedule, EveryTypeIsAcceptedAndListed) {
  for (const ScheduleOptions& options : all_types<ScheduleOptions>()) {
    const std::string type = type_of(options);
    if (type.empty()) continue;
    EXPECT_THAT(schedule_error(type, {}), ::testing::Not(HasSubstr("scheduler.type: found")));
  }
  EXPECT_THAT(schedule_error("WarmupRL", {}),
              AllOf(HasSubstr("scheduler.type"), HasSubstr("\"WarmupLR\", \"WarmupDecayLR\"")));
}

TEST(LrSchedule, ErrorsNameTheKey) {
  EXPECT_THAT(schedule_error("WarmupLR", {{"warmup_steps", {10}}}),
              AllOf(HasSubstr("scheduler.params.warmup_steps: unknown key"), HasSubstr("warmup_num_steps")));
  EXPECT_THAT(schedule_error("WarmupLR", {{"warmup_num_steps", {-1}}}),
              AllOf(HasSubstr("scheduler.params.warmup_num_steps"), HasSubstr("found -1"),
                    HasSubstr("an integer from 0")));
  EXPECT_THAT(schedule_error("WarmupLR", {{"warmup_num_steps", {2.5}}}), HasSubstr("an integer"));
  EXPECT_THAT(schedule_error("WarmupLR", {}, {{"warmup_type", "cosine"}}),
              AllOf(HasSubstr("scheduler.params.warmup_type"), HasSubstr("\"log\", \"linear\"")));
  EXPECT_THAT(schedule_error("WarmupLR", {}, {{"warmup_num_steps", "ten"}}),
              HasSubstr("expected an integer"));
  EXPECT_THAT(schedule_error("WarmupLR", {{"warmup_type", {1}}}), HasSubstr("\"log\", \"linear\""));
  EXPECT_THAT(schedule_error("WarmupLR", {{"warmup_max_lr", {1, 2, 3}}}, {}, 2),
              HasSubstr("one number, or 2"));
  EXPECT_THAT(schedule_error("WarmupDecayLR", {}), HasSubstr("scheduler.params.total_num_steps: is missing"));
  EXPECT_THAT(schedule_error("WarmupLR", {{"warmup_ratio", {0.1}}}),
              HasSubstr("scheduler.params.warmup_ratio"));
  EXPECT_THAT(schedule_error("OneCycle", {{"cycle_min_lr", {1}}}),
              HasSubstr("scheduler.params.cycle_max_lr: is missing"));
  EXPECT_THAT(schedule_error("OneCycle", one_cycle(), {{"cycle_momentum", "2"}}), HasSubstr("true or false"));
  EXPECT_THAT(schedule_error("LRRangeTest", {{"last_batch_iteration", {10}}}), HasSubstr("or -1"));
  EXPECT_EQ(schedule_error("LRRangeTest", {{"last_batch_iteration", {-1}}}), "");
  EXPECT_THAT(schedule_error("StepLR", {{"step_size", {3}}}, {{"interval", "epoch"}}),
              HasSubstr("scheduler.params.interval"));
  EXPECT_EQ(schedule_error("StepLR", {{"step_size", {3}}, {"last_epoch", {-1}}}, {}, 1, 10), "");
}

}  // namespace
}  // namespace tessera
