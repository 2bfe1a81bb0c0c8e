#include "train/report/early_stopping.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tessera::train {
namespace {

// The evaluation after which training stops, counted from 1; 0: never.
int stops_after(EarlyStopping stopping, const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    stopping.update(values[i]);
    if (stopping.should_stop()) return static_cast<int>(i) + 1;
  }
  return 0;
}

TEST(EarlyStopping, StopsAfterSoManyWithoutABetterOne) {
  EXPECT_EQ(stops_after({2, 0, true}, {0.5, 0.6, 0.6, 0.55, 0.9}), 4);
  EXPECT_EQ(stops_after({3, 0, true}, {0.5, 0.6, 0.6, 0.55, 0.9}), 0);
  EXPECT_EQ(stops_after({1, 0, true}, {0.5, 0.6, 0.6}), 3) << "an equal one is not better";
  EXPECT_EQ(stops_after({2, 0, false}, {0.5, 0.6, 0.4, 0.5, 0.45}), 5);
}

TEST(EarlyStopping, NeverWithoutPatience) {
  EXPECT_FALSE(EarlyStopping(0, 0, true).enabled());
  EXPECT_EQ(stops_after({0, 0, true}, {3, 2, 1, 0}), 0);
}

// As in transformers: a value that is better by less than the threshold is the
// new best, but counts as stale.
TEST(EarlyStopping, Threshold) {
  EXPECT_EQ(stops_after({2, 0.1, true}, {0.5, 0.55, 0.58}), 3);
  EXPECT_EQ(stops_after({2, 0.1, true}, {0.5, 0.55, 0.7, 0.71, 0.72}), 5);
  EXPECT_EQ(stops_after({2, 0.1, true}, {0.5, 0.59, 0.62}), 3)
      << "0.62 is 0.12 above the first, but 0.03 above the best";
}

TEST(EarlyStopping, WhatIsNoNumberIsNoBetter) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(stops_after({2, 0, false}, {nan, nan}), 2);
  EXPECT_EQ(stops_after({2, 0, false}, {0.5, nan, 0.4, nan, nan}), 5);
  EXPECT_EQ(stops_after({2, 0, true}, {nan, 0.1, 0.05}), 0) << "the first finite value is the first best";
}

TEST(EarlyStopping, GoesOnFromItsState) {
  EarlyStopping first(3, 0, true);
  for (const double value : {0.5, 0.7, 0.6}) first.update(value);
  EXPECT_EQ(first.state(), (EarlyStoppingState{.best = 0.7, .num_stale = 1}));
  EarlyStopping second(3, 0, true), less_patient(1, 0, true);
  second.set_state(first.state());
  less_patient.set_state(first.state());
  EXPECT_EQ(stops_after(second, {0.69, 0.68}), 2);
  EXPECT_TRUE(less_patient.should_stop()) << "with less patience it should stop";
}

}  // namespace
}  // namespace tessera::train
