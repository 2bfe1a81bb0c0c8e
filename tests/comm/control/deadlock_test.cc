// comm/control/deadlock.h: ranks that wait for each other over several groups, and waits that are no
// deadlock.
#include "comm/control/deadlock.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera::comm {
namespace {

using Issued = std::map<std::string, int64_t>;  // by group

WaitState waiting(const std::string& group, int64_t number, const Issued& issued) {
  WaitState state{.group = group, .number = number, .reports = {}};
  for (const auto& [name, count] : issued) {
    RankReport& report = state.reports[name];
    while (report.num_issued < count)
      report.record({.op = name + "'s", .label = "", .dtype = "", .numel = 0});
  }
  return state;
}

TEST(DeadlockTest, SurviveEncoding) {
  const WaitState original =
      waiting("main/1 gather", 17, {{"main", 3}, {"main/1 gather", 17}, {"main/2 reduce", 0}});
  const WaitState copy = WaitState::decode(original.encode());
  EXPECT_EQ(copy.group, original.group);
  EXPECT_EQ(copy.number, 17);
  EXPECT_EQ(copy.description(), original.description());
  EXPECT_EQ(copy.encode(), original.encode());
  EXPECT_EQ(copy.reports.at("main").num_issued, 3);
  EXPECT_EQ(copy.reports.at("main/2 reduce").num_issued, 0);
  EXPECT_TRUE(WaitState::decode(waiting("g", 1, {}).encode()).reports.empty());
  for (const char* text : {"", "g\n", "g\nx\ny\n", "g\n1\nt\nnot a number\n"})
    EXPECT_THROW(WaitState::decode(text), CommError) << text;
}

TEST(DeadlockTest, TwoRanksInACircle) {
  const WaitState on_a = waiting("a", 4, {{"a", 4}, {"b", 2}}), on_b = waiting("b", 3, {{"a", 3}, {"b", 3}});
  const WaitStates in_other_places = {std::nullopt, on_b, std::nullopt, on_a};
  EXPECT_EQ(find_deadlock({on_a, on_b}),
            "the ranks wait for each other: rank 0 waits in a's, which rank 1 has not come to; rank 1 "
            "waits in b's, which rank 0 has "
            "not come to");
  EXPECT_EQ(find_deadlock(in_other_places),
            "the ranks wait for each other: rank 1 waits in b's, which rank 3 has not come to; rank 3 "
            "waits in a's, which rank 1 has "
            "not come to");
}

TEST(DeadlockTest, ALongerCircleAndOneWhoStandsBeside) {
  const WaitState on_a = waiting("a", 1, {{"a", 1}, {"b", 1}, {"c", 0}});
  const WaitState on_b = waiting("b", 1, {{"a", 0}, {"b", 1}, {"c", 1}});
  const WaitState on_c = waiting("c", 1, {{"a", 1}, {"b", 0}, {"c", 1}});
  // Rank 3 waits for rank 0, and no rank for rank 3.
  const WaitState beside = waiting("c", 1, {{"a", 1}, {"b", 1}, {"c", 1}});
  const std::string circle =
      "the ranks wait for each other: rank 0 waits in a's, which rank 1 has not come to; rank 1 waits in "
      "b's, "
      "which rank 2 has not come to; rank 2 waits in c's, which rank 0 has not come to";
  EXPECT_EQ(find_deadlock({on_a, on_b, on_c, beside}), circle);
  std::string moved = circle;  // the search begins beside the circle
  for (char& c : moved)
    if (c >= '0' && c <= '2') ++c;
  EXPECT_EQ(find_deadlock({beside, on_a, on_b, on_c}), moved);
}

/// As many ranks as a large run has, of which two wait for each other.
TEST(DeadlockTest, AmongManyRanks) {
  WaitStates states(1000, waiting("a", 4, {{"a", 4}, {"b", 3}}));
  EXPECT_FALSE(find_deadlock(states) || find_difference(states));
  states[700] = waiting("b", 3, {{"a", 3}, {"b", 3}});
  states[900]->reports["b"].num_issued = 2;
  EXPECT_EQ(find_deadlock(states),
            "the ranks wait for each other: rank 700 waits in b's, which rank 900 has not come to; rank 900 "
            "waits in a's, which rank 700 has not come to");
}

TEST(DeadlockTest, NoCircle) {
  const WaitState on_a = waiting("a", 4, {{"a", 4}, {"b", 2}});
  EXPECT_FALSE(find_deadlock({on_a, std::nullopt})) << "the other one is at work";
  EXPECT_FALSE(find_deadlock({std::nullopt, on_a}));
  EXPECT_FALSE(find_deadlock({on_a, waiting("a", 4, {{"a", 4}, {"b", 2}})})) << "both wait for the same";
  EXPECT_FALSE(find_deadlock({on_a, waiting("b", 3, {{"a", 4}, {"b", 3}})})) << "it has done its part of a";
  EXPECT_FALSE(find_deadlock({on_a, waiting("checkpoint", 3, {{"checkpoint", 3}})}))
      << "its other thread sees to a";
}

TEST(DeadlockTest, FindsWhatAnotherRankHasIssuedInstead) {
  const WaitState mine = waiting("a", 2, {{"a", 2}, {"b", 1}});
  WaitState theirs = waiting("b", 1, {{"a", 1}, {"b", 1}});
  EXPECT_FALSE(find_difference({mine, theirs})) << "it is behind";
  EXPECT_FALSE(find_difference({std::nullopt, mine}));
  theirs.reports["a"].record({.op = "barrier", .label = "end", .dtype = "", .numel = 0});
  EXPECT_EQ(find_difference({mine, theirs}),
            "collective 2 differs between ranks: rank 0 issued a's, rank 1 issued barrier of \"end\"");
  EXPECT_EQ(find_difference({std::nullopt, theirs, mine}),
            "collective 2 differs between ranks: rank 1 issued barrier of \"end\", rank 2 issued a's");
  EXPECT_FALSE(find_difference({theirs, theirs})) << "no rank waits in group a";
  const WaitState behind = waiting("b", 1, {{"a", 1}, {"b", 1}});
  EXPECT_EQ(find_difference({behind, mine, theirs}),
            "collective 2 differs between ranks: rank 1 issued a's, rank 2 issued barrier of \"end\"");
}

}  // namespace
}  // namespace tessera::comm
