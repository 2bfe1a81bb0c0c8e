// OneCycle: rates and momentum, from DeepSpeed as in lr_schedule_test.cc.
#include <gtest/gtest.h>

#include "tests/engine/optimizer/lr_schedule_testing.h"

namespace tessera {
namespace {

TEST(LrSchedule, OneCycleWithoutDecay) {
  const LrSchedule schedule(make_config("OneCycle", one_cycle()), {0.1});
  expect_rates(schedule, {{0, {0.0001}},
                          {1, {0.0002124999999999999}},
                          {2, {0.0003250000000000001}},
                          {7, {0.0008875000000000003}},
                          {8, {0.0009999999999999998}},
                          {9, {0.000775}},
                          {10, {0.0005499999999999996}},
                          {11, {0.00032500000000000036}},
                          {12, {0.0001}},
                          {13, {0.0001}},
                          {30, {0.0001}}});
  expect_betas(schedule, {{0, {0.8}},
                          {1, {0.8875000000000001}},
                          {7, {0.8125}},
                          {8, {0.8}},
                          {9, {0.8250000000000001}},
                          {11, {0.875}},
                          {12, {0.9}},
                          {30, {0.9}}});
}

TEST(LrSchedule, OneCycleWithDecay) {
  const auto params = one_cycle({{"decay_step_size", {2}},
                                 {"decay_lr_rate", {0.5}},
                                 {"decay_mom_rate", {0.1}},
                                 {"cycle_min_mom", {0.85}},
                                 {"cycle_max_mom", {0.95}}});
  const LrSchedule schedule(make_config("OneCycle", params), {0.1});
  expect_rates(schedule, {{8, {0.0009999999999999998}},
                          {12, {0.0001}},
                          {13, {8e-05}},
                          {14, {6.666666666666667e-05}},
                          {17, {4.4444444444444447e-05}},
                          {30, {1.8181818181818182e-05}}});
  expect_betas(schedule, {{0, {0.85}},
                          {1, {0.9375}},
                          {8, {0.85}},
                          {12, {0.95}},
                          {13, {0.9974999999999999}},
                          {14, {1.045}},
                          {30, {1.805}}});
}

TEST(LrSchedule, OneCycleDecaysOnlyTheMomentum) {
  const auto params = one_cycle({{"decay_step_size", {2}}, {"decay_mom_rate", {0.1}}});
  const LrSchedule schedule(make_config("OneCycle", params), {0.1});
  expect_rates(schedule, {{5, {0.0006625000000000001}}, {13, {0.0001}}, {20, {0.0001}}});
  expect_betas(schedule, {{5, {0.8375}}, {12, {0.9}}, {13, {0.9450000000000001}}, {20, {1.26}}});
}

TEST(LrSchedule, OneCycleInStairs) {
  const auto stairs = one_cycle({{"cycle_first_stair_count", {4}}, {"cycle_second_stair_count", {2}}});
  expect_rates(LrSchedule(make_config("OneCycle", stairs), {0.1}), {{0, {0.0001}},
                                                                    {1, {0.0001}},
                                                                    {2, {0.000325}},
                                                                    {7, {0.0007750000000000001}},
                                                                    {8, {0.001}},
                                                                    {9, {0.00055}},
                                                                    {10, {0.00055}},
                                                                    {11, {0.0001}},
                                                                    {12, {0.0001}}});
  // The second half takes size and stairs of the first.
  const LrSchedule equal_halves(make_config("OneCycle", {{"cycle_min_lr", {1e-4}},
                                                         {"cycle_max_lr", {1e-3}},
                                                         {"cycle_first_step_size", {7}},
                                                         {"cycle_first_stair_count", {3}}}),
                                {0.1});
  expect_rates(equal_halves, {{2, {0.0001}},
                              {7, {0.001}},
                              {8, {0.0007}},
                              {9, {0.0007}},
                              {10, {0.00039999999999999996}},
                              {11, {0.00039999999999999996}},
                              {12, {0.0001}}});
  expect_betas(equal_halves,
               {{7, {0.8}}, {8, {0.8333333333333334}}, {10, {0.8666666666666667}}, {12, {0.9}}});
}

TEST(LrSchedule, OneCycleWithoutASecondHalfOrMomentum) {
  const auto params = Params{{"cycle_min_lr", {1e-4}},
                             {"cycle_max_lr", {1e-3}},
                             {"cycle_first_step_size", {8}},
                             {"cycle_second_step_size", {0}},
                             {"cycle_momentum", {0}}};
  const LrSchedule schedule(make_config("OneCycle", params), {0.1});
  expect_rates(schedule, {{0, {0.0001}},
                          {1, {0.00021250000000000002}},
                          {2, {0.000325}},
                          {7, {0.0008875}},
                          {8, {0.0001}},
                          {12, {0.0001}}});
  EXPECT_FALSE(schedule.betas(3).has_value());
}

}  // namespace
}  // namespace tessera
