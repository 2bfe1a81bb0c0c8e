// Tables of learning rates by step, and schedules as a configuration file gives them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/config/parse.h"
#include "engine/optimizer/lr_schedule.h"

namespace tessera {

struct Row {
  int64_t step;
  std::vector<double> rates;  // of each param group
};
using Table = std::vector<Row>;

using Params = std::map<std::string, std::vector<double>>;
using Choices = std::map<std::string, std::string>;

/// As from a configuration's file, with as many param groups as the longest list has values.
inline ScheduleOptions make_config(const std::string& type, const Params& params, const Choices& choices = {},
                                   size_t num_groups = 1) {
  nlohmann::json config = {{"train_batch_size", 1}, {"scheduler", {{"type", type}}}};
  nlohmann::json& written = config["scheduler"]["params"] = nlohmann::json::object();
  for (const auto& [key, values] : params) {
    written[key] = values.size() == 1 ? nlohmann::json(values[0]) : nlohmann::json(values);
    if (key == "cycle_momentum" || key == "lr_range_test_staircase") written[key] = values[0] != 0;
    if (num_groups == 1) num_groups = values.size();
  }
  for (const auto& [key, choice] : choices) written[key] = choice;
  for (size_t i = 1; i < num_groups; ++i) config["optimizer"]["param_groups"].push_back({{"match", "x"}});
  return parse_engine_config(config.dump()).scheduler;
}

// Rates that are zero by cancellation get the absolute part; both are far below
// what a wrong formula would give.
inline void expect_near(double found, double expected, int64_t step) {
  EXPECT_NEAR(found, expected, 1e-12 * std::abs(expected) + 1e-18) << "at step " << step;
}

inline void expect_rates(const LrSchedule& schedule, const Table& table) {
  for (const Row& row : table) {
    ASSERT_EQ(row.rates.size(), schedule.num_groups());
    for (size_t group = 0; group < row.rates.size(); ++group)
      expect_near(schedule.lr(row.step, group), row.rates[group], row.step);
  }
}

/// Table rows hold beta1.
inline void expect_betas(const LrSchedule& schedule, const Table& table) {
  for (const Row& row : table) {
    const auto betas = schedule.betas(row.step);
    ASSERT_TRUE(betas.has_value());
    expect_near(betas->beta1, row.rates[0], row.step);
    EXPECT_EQ(betas->beta2, 0.99);
  }
}

inline Params one_cycle(Params more = {}) {
  Params params = {{"cycle_min_lr", {1e-4}},
                   {"cycle_max_lr", {1e-3}},
                   {"cycle_first_step_size", {8}},
                   {"cycle_second_step_size", {4}}};
  params.merge(more);
  return params;
}

}  // namespace tessera
