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

std::vector<bool> are(const Plan& plan, Fate fate) {
  std::vector<bool> all;
  for (const Fate each : plan.fates) all.push_back(each == fate);
  return all;
}
std::vector<bool> dropped(const Plan& plan) { return are(plan, Fate::kRecompute); }
std::vector<bool> offloaded(const Plan& plan) { return are(plan, Fate::kOffload); }

TEST(Budget, KeepsAllThatFits) {
  const Plan plan = choose(chain({{1, 100}, {1, 200}}), 300);
  EXPECT_EQ(dropped(plan), (std::vector<bool>{false, false}));
  EXPECT_EQ(plan.kept_bytes, 300);
  EXPECT_EQ(plan.seconds, 0);
}

TEST(Budget, DropsTheMostBytesForASecond) {
  const Plan plan = choose(chain({{1, 100}, {0.1, 100}, {1, 100}}), 200);
  EXPECT_EQ(dropped(plan), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 200);
  EXPECT_DOUBLE_EQ(plan.seconds, 0.1);
}

TEST(Budget, CountsWhatLeadsToAResult) {
  Profile profile = chain({{1, 100}, {5, 100}, {0.1, 100}});
  profile.results[1].saved = false;  // so that result 2 costs calls 1 and 2
  EXPECT_EQ(dropped(choose(profile, 100)), (std::vector<bool>{true, false, false}));
}

TEST(Budget, DroppingWhatOthersStartFromIsCounted) {
  const Plan plan = choose(chain({{2, 100}, {1, 100}}), 0);
  EXPECT_EQ(dropped(plan), (std::vector<bool>{true, true}));
  EXPECT_DOUBLE_EQ(plan.seconds, 3);
}

TEST(Budget, TakesBackWhatFitsIntoTheRest) {
  // The cheapest for a byte are dropped first; the last one alone would have been enough.
  const Plan plan = choose(chain({{0.1, 50}, {1, 400}, {1e3, 1000}}), 1050);
  EXPECT_EQ(dropped(plan), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 1050);
}

TEST(Budget, SharedMemoryIsDroppedAsOne) {
  Profile profile = chain({{1, 100}, {0, 100}});
  profile.results[1].storage = 0;  // a view
  EXPECT_EQ(choose(profile, 100).kept_bytes, 100);
  const Plan plan = choose(profile, 50);
  EXPECT_EQ(dropped(plan), (std::vector<bool>{true, true}));
  EXPECT_EQ(plan.kept_bytes, 0);
}

TEST(Budget, WhatCannotBeMadeAgainStays) {
  Profile profile = chain({{1, 100}, {1, 100}, {1, 100}});
  profile.calls[0].repeatable = false;
  profile.results[2].pinned = true;
  profile.fixed_bytes = 7;
  const Plan plan = choose(profile, 0);
  EXPECT_EQ(dropped(plan), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 207);
}

/// A disk that copies, writes and reads so many bytes a second.
OffloadCost disk(double copy, double write, double read, int64_t min_bytes = 0) {
  return {.rates = {.copy = copy, .write = write, .read = read}, .min_bytes = min_bytes};
}

TEST(Budget, OffloadsWhatCostsMoreToRecompute) {
  // 100 bytes take 0.5 s to copy; the forward's 3.1 s hide the rest.
  const Profile profile = chain({{1, 100}, {0.1, 100}, {1, 100}, {1, 100}});
  const Plan plan = choose(profile, 250, disk(200, 1000, 1000));
  EXPECT_EQ(dropped(plan), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(offloaded(plan), (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(plan.kept_bytes, 100);
  EXPECT_EQ(plan.offloaded_bytes, 200);
  EXPECT_DOUBLE_EQ(plan.seconds, 0.1);
}

TEST(Budget, OffloadsNoMoreThanTheForwardHides) {
  // Two of these are written while the forward runs; the third would be waited for.
  const Profile profile = chain({{1, 100}, {1, 100}, {1, 100}, {1, 100}});
  const Plan plan = choose(profile, 0, disk(1e9, 50, 1e9));
  EXPECT_EQ(plan.offloaded_bytes, 200);
  EXPECT_EQ(plan.seconds, 2);
  EXPECT_EQ(choose(profile, 0, disk(1e9, 1e9, 12.5)).offloaded_bytes, 100) << "backward hides twice as much";
  EXPECT_EQ(choose(profile, 0, disk(1e9, 1e9, 1e9)).offloaded_bytes, 400);
}

TEST(Budget, BuffersArePartOfIt) {
  const Profile profile = chain({{1, 100}, {1, 100}, {1, 100}, {1, 100}});
  OffloadCost cost = disk(1e9, 1e9, 1e9);
  EXPECT_EQ(choose(profile, 300, cost).kept_bytes, 200) << "one of 100 bytes is in a buffer";
  cost.buffer_bytes = 150;
  EXPECT_EQ(choose(profile, 300, cost).kept_bytes, 100);
  EXPECT_EQ(choose(profile, 400, cost).kept_bytes, 400) << "without any on disk there are no buffers";
}

TEST(Budget, OffloadsWhatCannotBeMadeAgainButNothingSmall) {
  Profile profile = chain({{1, 100}, {1, 100}, {1, 40}});
  profile.calls[0].repeatable = profile.calls[2].repeatable = false;
  const Plan plan = choose(profile, 0, disk(1, 1, 1, /*min_bytes=*/50));
  EXPECT_EQ(offloaded(plan), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(dropped(plan), (std::vector<bool>{false, true, false})) << "made from what is on disk";
  EXPECT_EQ(plan.kept_bytes, 40);
}

}  // namespace
}  // namespace tessera::activations
