// Who waits for whom, over several groups: circles, and what only looks like one.
#include "comm/waits.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera::comm {
namespace {

using Issued = std::map<std::string, int64_t>;

Waiting waiting(const std::string& group, int64_t number, Issued issued) {
  return {.group = group, .number = number, .text = group + "'s", .issued = std::move(issued)};
}

TEST(WaitsTest, SurviveEncoding) {
  const Waiting original =
      waiting("main/1 gather", 17, {{"main", 3}, {"main/1 gather", 17}, {"main/2 reduce", 0}});
  const Waiting copy = Waiting::decode(original.encode());
  EXPECT_EQ(copy.group, original.group);
  EXPECT_EQ(copy.number, 17);
  EXPECT_EQ(copy.text, original.text);
  EXPECT_EQ(copy.issued, original.issued);
  EXPECT_EQ(Waiting::decode(waiting("g", 1, {}).encode()).issued, Issued{});
  for (const char* text : {"", "g\n", "g\nx\ny\n", "g\n1\nt\nnot a number\n"})
    EXPECT_THROW(Waiting::decode(text), CommError) << text;
}

TEST(WaitsTest, TwoRanksInACircleSayTheSame) {
  const Waiting on_a = waiting("a", 4, {{"a", 4}, {"b", 2}}), on_b = waiting("b", 3, {{"a", 3}, {"b", 3}});
  for (int rank : {0, 1})
    EXPECT_EQ(describe_circle({on_a, on_b}, rank),
              "the ranks wait for each other: rank 0 waits in a's, which rank 1 has not come to; rank 1 "
              "waits in b's, which rank 0 has "
              "not come to");
}

TEST(WaitsTest, ALongerCircleAndOneWhoStandsBeside) {
  const Waiting on_a = waiting("a", 1, {{"a", 1}, {"b", 1}, {"c", 0}});
  const Waiting on_b = waiting("b", 1, {{"a", 0}, {"b", 1}, {"c", 1}});
  const Waiting on_c = waiting("c", 1, {{"a", 1}, {"b", 0}, {"c", 1}});
  // Rank 3 waits for rank 0, and nobody for it.
  const Waiting beside = waiting("c", 1, {{"a", 1}, {"b", 1}, {"c", 1}});
  const std::vector<std::optional<Waiting>> all{on_a, on_b, on_c, beside};
  for (int rank : {0, 1, 2}) EXPECT_TRUE(describe_circle(all, rank).has_value()) << rank;
  EXPECT_FALSE(describe_circle(all, 3).has_value());
}

TEST(WaitsTest, NoCircle) {
  const Waiting on_a = waiting("a", 4, {{"a", 4}, {"b", 2}});
  EXPECT_FALSE(describe_circle({on_a, std::nullopt}, 0)) << "the other one is at work";
  EXPECT_FALSE(describe_circle({std::nullopt, on_a}, 0));
  EXPECT_FALSE(describe_circle({on_a, waiting("a", 4, {{"a", 4}, {"b", 2}})}, 0)) << "both wait for the same";
  EXPECT_FALSE(describe_circle({on_a, waiting("b", 3, {{"a", 4}, {"b", 3}})}, 0))
      << "it has done its part of a";
  EXPECT_FALSE(describe_circle({on_a, waiting("checkpoint", 3, {{"checkpoint", 3}})}, 1))
      << "its other thread sees to a";
}

}  // namespace
}  // namespace tessera::comm
