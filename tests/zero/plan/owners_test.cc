// Which rank updates which parameter as a whole.
#include "zero/plan/owners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace tessera::zero {
namespace {

TEST(Owners, EachThatHasACostHasOneAndTheCostliestIsRank0s) {
  EXPECT_EQ(owners_of({10, 40, 30, 25}, 2), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(owners_of({10, -1, 30, 25}, 2), (std::vector<int>{1, -1, 0, 1}));
  EXPECT_EQ(owners_of({5}, 3), (std::vector<int>{0}));
  EXPECT_EQ(owners_of({7, 7, 7}, 3), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(owners_of({0}, 2), (std::vector<int>{0}));
}

// Graham's bound of the rule "largest first": 4/3 of the best, which is at least the mean and the largest.
TEST(Owners, RanksAreEven) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int world = 1 + static_cast<int>(random() % 8);
    std::vector<int64_t> sizes(1 + random() % 60);
    for (int64_t& size : sizes) size = 1 + static_cast<int64_t>(random() % 5'000);
    const std::vector<int> owners = owners_of(sizes, world);
    std::vector<int64_t> numel(static_cast<size_t>(world), 0);
    for (size_t i = 0; i < sizes.size(); ++i) numel.at(static_cast<size_t>(owners[i])) += sizes[i];
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const int64_t mean = (sum + world - 1) / world, largest = *std::max_element(sizes.begin(), sizes.end());
    std::vector<int64_t> sorted = sizes;
    std::sort(sorted.rbegin(), sorted.rend());
    // Of world + 1 parameters two have to share a rank.
    const auto n = static_cast<size_t>(world);
    const int64_t shared = sorted.size() > n ? sorted[n - 1] + sorted[n] : 0;
    const int64_t best = std::max({mean, largest, shared});
    EXPECT_LE(3 * *std::max_element(numel.begin(), numel.end()), 4 * best + 3 * world);
  }
}

}  // namespace
}  // namespace tessera::zero
