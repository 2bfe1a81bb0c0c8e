// History and explain(): who is blamed for what, without a network.
#include "comm/explain.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera::comm {
namespace {

Call call(const std::string& op, const std::string& label) {
  return {.op = op, .label = label, .dtype = "Float", .numel = 8};
}

History history(int num_calls) {
  History history;
  for (int i = 1; i <= num_calls; ++i) history.record(call("all_reduce", "unit " + std::to_string(i)));
  return history;
}

Report report(Fault fault, int num_calls) {
  return {.fault = fault, .waited = std::chrono::seconds(2), .history = history(num_calls), .left = ""};
}

Failure failure(Fault own, int number, std::vector<Report> others) {
  Failure failure;
  failure.rank = 0;
  failure.number = number;
  failure.cause = "Read error";
  failure.timeout = std::chrono::seconds(2);
  failure.reports.push_back(report(own, number));
  for (Report& other : others) failure.reports.push_back(std::move(other));
  return failure;
}

constexpr const char* kSecond = "all_reduce of \"unit 2\" (8 x Float), collective 2: ";

TEST(HistoryTest, SurvivesEncoding) {
  History original = history(100);
  original.record({.op = "exchange", .label = "a\tb\nc", .dtype = "", .numel = 0});
  const History decoded = History::decode(original.encode());
  EXPECT_EQ(decoded.issued(), 101);
  EXPECT_EQ(decoded.find(101)->label, "a b c");
  EXPECT_EQ(*decoded.find(100), call("all_reduce", "unit 100"));
  EXPECT_EQ(decoded.find(101 - static_cast<int64_t>(History::kWindow)), nullptr);
  EXPECT_EQ(decoded.find(102), nullptr);
  EXPECT_EQ(first_difference(original, decoded), std::nullopt);
}

TEST(HistoryTest, RefusesWhatItCannotRead) {
  for (const char* text : {"", "x", "3\n1\n", "1\n1\nop\tlabel\n", "1\n1\nop\tlabel\tFloat\tmany\n"}) {
    EXPECT_THROW(History::decode(text), CommError) << text;
  }
}

TEST(HistoryTest, FindsTheFirstDifference) {
  History a = history(5);
  History b = history(5);
  a.record(call("all_gather", "unit 6"));
  EXPECT_EQ(first_difference(a, b), std::nullopt) << "being ahead is no difference";
  b.record(call("reduce_scatter", "unit 6"));
  EXPECT_EQ(first_difference(a, b), 6);
}

TEST(HistoryTest, FingerprintsTellCallsApart) {
  const Call base = call("all_gather", "unit 1");
  for (Call other : {call("reduce_scatter", "unit 1"), call("all_gather", "unit 2"),
                     Call{.op = "all_gather", .label = "unit 1", .dtype = "Half", .numel = 8},
                     Call{.op = "all_gather", .label = "unit 1", .dtype = "Float", .numel = 9}}) {
    EXPECT_NE(base.fingerprint(), other.fingerprint()) << other.text();
  }
  EXPECT_LE(base.fingerprint(), 0xffffu);
}

TEST(ExplainTest, NamesWhoHasNotArrived) {
  EXPECT_EQ(
      explain(failure(Fault::kTimeout, 2, {report(Fault::kTimeout, 2), Report{}, report(Fault::kClosed, 1)})),
      std::string(kSecond) + "ranks 2 and 3 have not arrived within 2 s");
  EXPECT_EQ(explain(failure(Fault::kClosed, 2, {report(Fault::kTimeout, 2), Report{}})),
            std::string(kSecond) + "rank 2 has not arrived within 2 s");
  Report late = report(Fault::kClosed, 2);
  late.waited = std::chrono::milliseconds(1);
  EXPECT_EQ(explain(failure(Fault::kTimeout, 2, {late})),
            std::string(kSecond) + "rank 1 has not arrived within 2 s");
  Failure own_lateness = failure(Fault::kClosed, 2, {report(Fault::kTimeout, 2), late});
  own_lateness.reports[0].waited = std::chrono::milliseconds(1);
  EXPECT_EQ(explain(own_lateness),
            std::string(kSecond) + "rank 0 came too late: rank 1 had given up after 2 s");
}

TEST(ExplainTest, NamesWhoIsGone) {
  EXPECT_EQ(explain(failure(Fault::kClosed, 2, {Report{}, report(Fault::kClosed, 2)})),
            std::string(kSecond) + "rank 1 is gone (connection closed)");
  Failure slow =
      failure(Fault::kClosed, 2,
              {Report{}, Report{}});  // neither has reported, and one of them is known to have ended
  slow.gone = {2};
  EXPECT_EQ(explain(slow), std::string(kSecond) + "rank 2 is gone (connection closed)");
}

TEST(ExplainTest, NamesWhoLeftAndWhy) {
  Report left;
  left.left = "boom";
  EXPECT_EQ(explain(failure(Fault::kClosed, 2, {left, report(Fault::kClosed, 2)})),
            std::string(kSecond) + "rank 1 left the group: boom");
}

TEST(ExplainTest, NamesWhoWentAnotherWay) {
  Report other = report(Fault::kTimeout, 1);
  other.history.record(call("all_gather", "unit 2"));
  EXPECT_EQ(explain(failure(Fault::kTimeout, 2, {report(Fault::kTimeout, 2), other})),
            "collective 2 differs between ranks: rank 0 issued all_reduce of \"unit 2\" (8 x Float), "
            "rank 2 issued all_gather of \"unit 2\" (8 x Float)");
}

TEST(ExplainTest, SaysWhenNobodyIsToBlame) {
  EXPECT_EQ(explain(failure(Fault::kTimeout, 2, {report(Fault::kClosed, 2)})),
            std::string(kSecond) + "all ranks arrived, but it was not done within 2 s");
  EXPECT_EQ(explain(failure(Fault::kClosed, 2, {report(Fault::kTimeout, 3)})),
            std::string(kSecond) + "rank 0 came too late: rank 1 had given up after 2 s");
  EXPECT_EQ(explain(failure(Fault::kClosed, 2, {report(Fault::kClosed, 2)})),
            std::string(kSecond) + "a connection between ranks broke (Read error)");
}

TEST(ExplainTest, Words) {
  EXPECT_EQ(name_ranks({4}), "rank 4");
  EXPECT_EQ(name_ranks({1, 2, 5}), "ranks 1, 2 and 5");
  EXPECT_EQ(name_duration(std::chrono::minutes(30)), "30 min");
  EXPECT_EQ(name_duration(std::chrono::milliseconds(1500)), "1.5 s");
  EXPECT_EQ(first_line("failed with [/src/pair.h:311] Connect timeout [127.0.0.1]:1"),
            "failed with Connect timeout [127.0.0.1]:1");
  EXPECT_EQ(first_line("[../x.cc:12] Timed out\nException raised from"), "Timed out");
}

}  // namespace
}  // namespace tessera::comm
