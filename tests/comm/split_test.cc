// Parts of a group: their collectives, their independence of the whole group's, what carries them, and what
// their failures say.
#include <gtest/gtest.h>

#include <chrono>
#include <latch>

#include "comm/init/init.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"

namespace tessera::comm {
namespace {

using testing::error_of;
using testing::filled;
using testing::quick_options;
using testing::summed_over;

using Grouping = std::vector<int>;  // by rank: its part

std::vector<int> ranks_of(const Grouping& grouping, int part) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < grouping.size(); ++rank)
    if (grouping[rank] == part) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

class SplitTest : public ::testing::TestWithParam<std::string> {
 protected:
  static void run(int world, const std::function<void(CommunicatorPtr)>& body) {
    testing::run_ranks(world, quick_options(GetParam()), body);
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, SplitTest,
                         ::testing::Values("gloo", "gloo_verified", "shm", "hybrid", "hybrid_verified",
                                           "staged"),
                         testing::backend_name);

TEST_P(SplitTest, CollectivesAreThoseOfThePart) {
  for (const Grouping& grouping : {Grouping{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2, 0, 1, 2}}) {
    run(static_cast<int>(grouping.size()), [&](CommunicatorPtr whole) {
      const std::vector<int> ranks = ranks_of(grouping, grouping[whole->rank()]);
      const CommunicatorPtr part = whole->split(ranks, "part");
      ASSERT_EQ(part->size(), static_cast<int>(ranks.size()));
      ASSERT_EQ(ranks[part->rank()], whole->rank());
      const int size = part->size();
      for (const int64_t numel : {int64_t{1}, int64_t{1000}, int64_t{300'000}}) {
        if (numel > 1000 && grouping.size() > 4) continue;
        const at::Tensor full = filled(whole->rank(), 0, size * numel, at::kFloat);
        const at::Tensor shard = at::empty({numel});
        part->reduce_scatter(full, {shard, 0.5}, "reduced")->wait();
        EXPECT_TRUE(at::equal(shard, summed_over(ranks, part->rank() * numel, numel, at::kFloat) / 2));
        part->all_gather(full, filled(whole->rank(), 5, numel, at::kFloat), "gathered")->wait();
        for (int r = 0; r < size; ++r)
          EXPECT_TRUE(at::equal(full.narrow(0, r * numel, numel), filled(ranks[r], 5, numel, at::kFloat)));
        const at::Tensor sum = filled(whole->rank(), 2, numel, at::kFloat);
        part->all_reduce(sum, "sum")->wait();
        EXPECT_TRUE(at::equal(sum, summed_over(ranks, 2, numel, at::kFloat)));
        part->broadcast(sum.copy_(filled(whole->rank(), 3, numel, at::kFloat)), size - 1, "copied")->wait();
        EXPECT_TRUE(at::equal(sum, filled(ranks.back(), 3, numel, at::kFloat)));
      }
      part->barrier("end");
      EXPECT_EQ(part->exchange(whole->rank(), "numbers"), ranks);
      const CommunicatorPtr again = part->duplicate("again");
      EXPECT_EQ(again->exchange(whole->rank(), "numbers"), ranks);
    });
  }
}

TEST_P(SplitTest, APartOfAPartKeepsTheNumbersOfAll) {
  run(4, [](CommunicatorPtr whole) {
    const Grouping halves{0, 0, 1, 1};
    const CommunicatorPtr half = whole->split(ranks_of(halves, halves[whole->rank()]), "half");
    if (half->size() > 1) {
      EXPECT_EQ(half->global_rank(half->rank()), whole->rank());
    }
    const CommunicatorPtr alone = half->split({half->rank()}, "alone");
    EXPECT_EQ(alone->size(), 1);
    alone->all_reduce(at::ones({4}), "sum")->wait();
    whole->barrier("end");
  });
}

TEST_P(SplitTest, NeedNoCommonOrderWithTheWhole) {
  run(4, [](CommunicatorPtr whole) {
    const Grouping pairs{0, 1, 0, 1};
    const CommunicatorPtr part = whole->split(ranks_of(pairs, pairs[whole->rank()]), "pair");
    const at::Tensor of_whole = at::ones({1000}), of_part = at::ones({1000});
    WorkPtr first, second;
    if (whole->rank() < 2) {
      first = whole->all_reduce(of_whole, "whole");
      second = part->all_reduce(of_part, "part");
    } else {
      second = part->all_reduce(of_part, "part");
      first = whole->all_reduce(of_whole, "whole");
    }
    second->wait();
    first->wait();
    EXPECT_EQ(of_whole[0].item<float>(), 4);
    EXPECT_EQ(of_part[0].item<float>(), 2);
  });
}

TEST_P(SplitTest, AFailureNamesRanksOfTheWholeGroup) {
  JoinOptions options = quick_options(GetParam(), std::chrono::seconds(1));
  std::string error;
  std::latch has_failed(1);
  EXPECT_NO_THROW(testing::run_ranks(4, options, [&](CommunicatorPtr whole) {
    const Grouping pairs{0, 1, 0, 1};
    const CommunicatorPtr part = whole->split(ranks_of(pairs, pairs[whole->rank()]), "pair");
    if (whole->rank() == 1) {
      error = error_of([&] { part->all_reduce(at::ones({8}), "lonely")->wait(); });
      has_failed.count_down();
    } else if (whole->rank() == 3) {
      has_failed.wait();
    }
  }));
  EXPECT_NE(error.find("rank 3 has not arrived within 1 s"), std::string::npos) << error;
}

// Rank 0 waits for rank 1 on the whole group, and rank 1 for rank 0 on a part of it.
TEST_P(SplitTest, RanksThatWaitForEachOtherOnAPartAndTheWholeAreFound) {
  // Half of the limit passes before ranks look for such a circle.
  const JoinOptions options = quick_options(GetParam(), std::chrono::seconds(4));
  const std::string error = error_of<CommError>([&] {
    testing::run_ranks(3, options, [](CommunicatorPtr whole) {
      const Grouping grouping{1, 1, 0};
      const CommunicatorPtr part = whole->split(ranks_of(grouping, grouping[whole->rank()]), "a part\nof it");
      (whole->rank() == 1 ? part : whole)->all_reduce(at::ones({8}), "sum")->wait();
    });
  });
  EXPECT_NE(error.find("the ranks wait for each other: rank 0 waits in all_reduce of \"sum\""),
            std::string::npos)
      << error;
}

TEST_P(SplitTest, ARankInTwoListsIsAnError) {
  const std::string error = error_of<CommError>([&] {
    run(3, [](CommunicatorPtr whole) {
      whole->split(whole->rank() == 2 ? std::vector<int>{1, 2} : std::vector<int>{0, 1}, "part");
    });
  });
  EXPECT_NE(error.find("rank 2 counts rank 1 in its group"), std::string::npos) << error;
}

TEST(HybridSplit, IsCarriedByWhatItsRanksShare) {
  const JoinOptions options = quick_options("hybrid");
  const GivenMachine given{.host = [](int rank) { return str("host ", rank / 2); }};
  run_threads(6, options, given, [](CommunicatorPtr whole) {
    EXPECT_EQ(whole->backend(), "hybrid");
    const int rank = whole->rank();
    EXPECT_EQ(whole->split({rank - rank % 2, rank - rank % 2 + 1}, "host")->backend(), "shm");
    EXPECT_EQ(whole->split({rank % 2, rank % 2 + 2, rank % 2 + 4}, "column")->backend(), "gloo");
    const CommunicatorPtr three =
        whole->split(rank < 3 ? std::vector<int>{0, 1, 2} : std::vector<int>{3, 4, 5}, "three");
    EXPECT_EQ(three->backend(), "hybrid");
    EXPECT_EQ(three->host_rank().num_ranks, rank == 2 || rank == 3 ? 1 : 2);
  });
}

}  // namespace
}  // namespace tessera::comm
