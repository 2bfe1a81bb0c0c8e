// The order of a pass's gathers, without units or ranks.
#include "zero/plan/collective_order.h"

#include <gtest/gtest.h>

namespace tessera::zero {
namespace {

using Units = std::vector<int>;

/// Room for two of four units at a time, without prefetches.
PlanBudget two_of_four() {
  return {.capacity_units = 2,
          .prefetch_numel = 0,
          .unit_numel = {10, 10, 10, 10},
          .persistent = std::vector<bool>(4, false)};
}

/// A training pass that uses the units one after another, an operator each.
void record(CollectiveOrder& order, const Units& units) {
  order.begin(Pass::kTrain);
  ASSERT_TRUE(order.recording());
  for (size_t i = 0; i < units.size(); ++i) order.record(units[i], static_cast<int64_t>(i));
  order.end(order.recorded());
}

TEST(CollectiveOrder, APassIsReplayedOnceItHasBeenRecorded) {
  CollectiveOrder order(two_of_four(), {}, false);
  EXPECT_EQ(order.recorded_order(Pass::kTrain), nullptr);
  record(order, {0, 1, 1, 2, 0});
  const Trace* trace = order.recorded_order(Pass::kTrain);
  ASSERT_NE(trace, nullptr);
  EXPECT_EQ(*trace, (Trace{{0, 0, 0}, {1, 1, 2}, {2, 3, 3}, {0, 4, 4}}));
  EXPECT_EQ(order.recorded_order(Pass::kEvaluation), nullptr) << "each kind of pass has its own";

  order.begin(Pass::kTrain);
  EXPECT_TRUE(order.replaying());
  order.make_plan({});
  Units gathered;
  const auto take = [&](const std::vector<PlanAction>& actions) {
    for (const PlanAction& action : actions)
      if (action.kind == PlanAction::kUnshard) gathered.push_back(action.unit);
  };
  take(order.plan().actions.front());
  while (order.place() < order.last_place()) take(order.advance());
  EXPECT_EQ(gathered.front(), 0);
  EXPECT_EQ(static_cast<int>(gathered.size()), order.plan().num_gathers);
  order.end({});
  EXPECT_FALSE(order.in_pass());
  EXPECT_NE(order.recorded_order(Pass::kTrain), nullptr) << "an empty trace changes nothing";
}

TEST(CollectiveOrder, APassThatLeavesTheOrderIsRecordedAnew) {
  CollectiveOrder order(two_of_four(), {}, false);
  record(order, {0, 1});
  order.begin(Pass::kTrain);
  order.make_plan({});
  order.leave();
  EXPECT_FALSE(order.replaying());
  EXPECT_FALSE(order.recording());
  order.end({});
  order.begin(Pass::kTrain);
  EXPECT_TRUE(order.recording());
}

TEST(CollectiveOrder, ADroppedPassKeepsTheOrder) {
  CollectiveOrder order(two_of_four(), {}, false);
  record(order, {0, 1});
  order.begin(Pass::kTrain);
  order.drop();
  EXPECT_FALSE(order.in_pass());
  order.begin(Pass::kTrain);
  EXPECT_TRUE(order.replaying());
}

// [Note: one order on a device]
TEST(CollectiveOrder, PlacesSayHowManyReductionsWereReady) {
  for (const bool one_order : {false, true}) {
    CollectiveOrder order(two_of_four(), {1, 0}, one_order);
    order.begin(Pass::kTrain);
    order.record(0, 0);
    order.record(1, 1);
    order.reductions.begin_backward();
    order.record(0, 2);
    order.reductions.gradient_complete(1);
    order.record(1, 3);
    EXPECT_FALSE(order.reductions_have_places()) << "while it is recorded, hooks issue them";
    order.end(order.recorded());
    const Trace& trace = *order.recorded_order(Pass::kTrain);
    for (size_t place = 0; place < 3; ++place) EXPECT_EQ(trace[place].reductions, 0);
    EXPECT_EQ(trace[3].reductions, one_order ? 1 : 0);
    order.begin(Pass::kTrain);
    EXPECT_EQ(order.reductions_have_places(), one_order);
  }
}

}  // namespace
}  // namespace tessera::zero
