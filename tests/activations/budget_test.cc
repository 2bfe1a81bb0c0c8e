#include "activations/budget.h"

#include <gtest/gtest.h>

namespace tessera::activations {
namespace {

/// A chain: each call reads the result before it. By call: seconds, bytes of its result.
Profile chain(const std::vector<std::pair<double, int64_t>>& calls) {
  Profile profile;
  for (const auto& [seconds, bytes] : calls) {
    const int id = static_cast<int>(profile.calls.size());
    profile.calls.push_back({.name = "op", .seconds = seconds, .repeatable = true});
    if (id > 0) profile.calls.back().inputs = {id - 1};
    profile.results.push_back({.call = id, .storage = id, .bytes = bytes, .saved = true});
  }
  return profile;
}

TEST(Budget, KeepsAllThatFits) {
  const Plan plan = choose(chain({{1, 100}, {1, 200}}), 300);
  EXPECT_EQ(plan.drop, (std::vector<bool>{false, false}));
  EXPECT_EQ(plan.kept_bytes, 300);
  EXPECT_EQ(plan.seconds, 0);
}

TEST(Budget, DropsTheMostBytesForASecond) {
  const Plan plan = choose(chain({{1, 100}, {0.1, 100}, {1, 100}}), 200);
  EXPECT_EQ(plan.drop, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 200);
  EXPECT_DOUBLE_EQ(plan.seconds, 0.1);
}

TEST(Budget, CountsWhatLeadsToAResult) {
  Profile profile = chain({{1, 100}, {5, 100}, {0.1, 100}});
  profile.results[1].saved = false;  // so that result 2 costs calls 1 and 2
  EXPECT_EQ(choose(profile, 100).drop, (std::vector<bool>{true, false, false}));
}

TEST(Budget, DroppingWhatOthersStartFromIsCounted) {
  const Plan plan = choose(chain({{2, 100}, {1, 100}}), 0);
  EXPECT_EQ(plan.drop, (std::vector<bool>{true, true}));
  EXPECT_DOUBLE_EQ(plan.seconds, 3);
}

TEST(Budget, TakesBackWhatFitsIntoTheRest) {
  // The cheapest for a byte are dropped first; the last one alone would have been enough.
  const Plan plan = choose(chain({{0.1, 50}, {1, 400}, {1e3, 1000}}), 1050);
  EXPECT_EQ(plan.drop, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 1050);
}

TEST(Budget, SharedMemoryIsDroppedAsOne) {
  Profile profile = chain({{1, 100}, {0, 100}});
  profile.results[1].storage = 0;  // a view
  EXPECT_EQ(choose(profile, 100).kept_bytes, 100);
  const Plan plan = choose(profile, 50);
  EXPECT_EQ(plan.drop, (std::vector<bool>{true, true}));
  EXPECT_EQ(plan.kept_bytes, 0);
}

TEST(Budget, WhatCannotBeMadeAgainStays) {
  Profile profile = chain({{1, 100}, {1, 100}, {1, 100}});
  profile.calls[0].repeatable = false;
  profile.results[2].pinned = true;
  profile.fixed_bytes = 7;
  const Plan plan = choose(profile, 0);
  EXPECT_EQ(plan.drop, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 207);
}

}  // namespace
}  // namespace tessera::activations
