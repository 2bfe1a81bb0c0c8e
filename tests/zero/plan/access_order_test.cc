// What a step of training uses next, predicted from the step before.
#include "zero/plan/access_order.h"

#include <gtest/gtest.h>

namespace tessera::zero {
namespace {

std::vector<int> next(const AccessOrder& order, size_t count = 100) {
  std::vector<int> tensors;
  order.for_each_next([&](AccessOrder::Use use) {
    tensors.push_back(use.tensor);
    return tensors.size() < count;
  });
  return tensors;
}

void use(AccessOrder& order, const std::vector<int>& tensors) {
  for (const int tensor : tensors) order.used({.tensor = tensor});
}

AccessOrder after(const std::vector<int>& step) {
  AccessOrder order;
  order.begin_step();
  use(order, step);
  order.begin_step();
  return order;
}

TEST(AccessOrderTest, TheFirstStepIsUnknown) {
  AccessOrder order;
  use(order, {1, 2});
  EXPECT_TRUE(next(order).empty());
}

TEST(AccessOrderTest, AStepIsLikeTheOneBefore) {
  AccessOrder order = after({0, 1, 2, 1, 0});
  EXPECT_EQ(next(order), (std::vector{0, 1, 2, 1, 0}));
  use(order, {0, 1});
  EXPECT_EQ(next(order), (std::vector{2, 1, 0, 0, 1})) << "and the step after it is, too";
  EXPECT_EQ(next(order, 2), (std::vector{2, 1}));
}

TEST(AccessOrderTest, SaysWhatIsOverwritten) {
  AccessOrder order;
  order.used({.tensor = 3, .overwrite = true});
  order.begin_step();
  bool overwrite = false;
  order.for_each_next([&](AccessOrder::Use use) { return overwrite = use.overwrite, false; });
  EXPECT_TRUE(overwrite);
}

TEST(AccessOrderTest, NeighboursMayChangePlaces) {
  AccessOrder order = after({0, 1, 2, 3});
  use(order, {1});
  EXPECT_EQ(next(order, 3), (std::vector{0, 2, 3})) << "0 is still to come";
  use(order, {0});
  EXPECT_EQ(next(order, 2), (std::vector{2, 3}));
}

TEST(AccessOrderTest, WhatIsLeftOutIsPassedOver) {
  std::vector<int> step(40);
  for (int i = 0; i < 40; ++i) step[i] = i;
  AccessOrder order = after(step);
  for (int i = 10; i < 40; ++i) {
    use(order, {i});
    const std::vector<int> following = next(order, 16);
    if (i >= 30 && i < 39) EXPECT_GT(following.front(), 9) << i;
  }
  order.begin_step();
  EXPECT_EQ(next(order, 1), (std::vector{10})) << "the next step has learnt that";
}

TEST(AccessOrderTest, WhatIsNewChangesNothing) {
  AccessOrder order = after({0, 1, 2});
  use(order, {0, 7, 7});
  EXPECT_EQ(next(order, 2), (std::vector{1, 2}));
  use(order, {1, 2});
  order.begin_step();
  EXPECT_EQ(next(order), (std::vector{0, 7, 7, 1, 2}));
}

TEST(AccessOrderTest, ADetourComesFirstAndIsNotLearnt) {
  AccessOrder order = after({0, 1, 2});
  use(order, {0});
  order.expect({2, 1, 0});
  EXPECT_EQ(next(order, 5), (std::vector{2, 1, 0, 1, 2}));
  use(order, {2, 1, 0});
  EXPECT_EQ(next(order, 2), (std::vector{1, 2}));
  use(order, {1, 2});
  order.begin_step();
  EXPECT_EQ(next(order), (std::vector{0, 1, 2}));
}

TEST(AccessOrderTest, ADetourThatIsLeftIsForgotten) {
  AccessOrder order = after({0, 1, 2, 3});
  order.expect({7, 8, 9});
  use(order, {7, 0});
  EXPECT_EQ(next(order, 3), (std::vector{1, 2, 3}));
}

}  // namespace
}  // namespace tessera::zero
