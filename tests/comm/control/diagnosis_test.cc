// RankReport and diagnose(): which rank an error names, and why. Without a network.
#include "comm/control/diagnosis.h"

#include <gtest/gtest.h>

#include "comm/control/error_message.h"
#include "core/error.h"

namespace tessera::comm {
namespace {

CollectiveDesc desc(const std::string& op, const std::string& label) {
  return {.op = op, .label = label, .dtype = "Float", .numel = 8};
}

RankReport report(Fault fault, int num_issued) {
  RankReport report;
  report.fault = fault;
  report.waited = std::chrono::seconds(2);
  for (int i = 1; i <= num_issued; ++i) report.record(desc("all_reduce", "unit " + std::to_string(i)));
  return report;
}

Failure failure(Fault own, int number, std::vector<RankReport> others) {
  Failure failure;
  failure.rank = 0;
  failure.number = number;
  failure.cause = "Read error";
  failure.timeout = std::chrono::seconds(2);
  failure.reports.push_back(report(own, number));
  for (RankReport& other : others) failure.reports.push_back(std::move(other));
  return failure;
}

constexpr const char* kSecond = "all_reduce of \"unit 2\" (8 x Float), collective 2: ";

TEST(RankReportTest, SurvivesEncoding) {
  RankReport original = report(Fault::kTimeout, 100);
  original.record({.op = "exchange", .label = "a\tb\nc", .dtype = "", .numel = 0});
  const std::string text = original.encode() + "more";
  std::string_view rest = text;
  const RankReport decoded = RankReport::decode(rest);
  EXPECT_EQ(rest, "more");
  EXPECT_EQ(decoded.fault, Fault::kTimeout);
  EXPECT_EQ(decoded.waited, std::chrono::seconds(2));
  EXPECT_EQ(decoded.num_issued, 101);
  EXPECT_EQ(decoded.find(101)->label, "a b c");
  EXPECT_EQ(*decoded.find(100), desc("all_reduce", "unit 100"));
  EXPECT_EQ(decoded.find(101 - static_cast<int64_t>(RankReport::kWindow)), nullptr);
  EXPECT_EQ(decoded.find(102), nullptr);
  EXPECT_EQ(first_difference(original, decoded), std::nullopt);
}

TEST(RankReportTest, PackedReportsHaveWhatIsAlikeOnce) {
  std::vector<RankReport> reports(1000, report(Fault::kClosed, 200));
  reports[1].fault = Fault::kTimeout;
  reports[1].waited = std::chrono::milliseconds(7);
  reports[2] = report(Fault::kNone, 199);
  reports[3] = {};
  reports[3].left = "it said\nso";
  const std::string packed = pack_reports(reports);
  EXPECT_LT(packed.size(), 1000 * 30 + 3 * reports[0].encode().size());
  const std::vector<RankReport> unpacked = unpack_reports(packed, 1000);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    EXPECT_EQ(unpacked[rank].encode(), reports[rank].encode()) << rank;
    EXPECT_EQ(unpacked[rank].left, reports[rank].left) << rank;
  }
  for (const int size : {0, 999, 1001}) EXPECT_THROW(unpack_reports(packed, size), CommError) << size;
  for (size_t length = 0; length < packed.size(); length += 997)
    EXPECT_THROW(unpack_reports(std::string_view(packed).substr(0, length), 1000), CommError) << length;
  EXPECT_THROW(unpack_reports("0\n0\n0\nnone\n0\n0\n", 1), CommError) << "no such list";
}

TEST(RankReportTest, RefusesWhatItCannotRead) {
  const std::string head = "closed\n5\n";
  const auto decode = [](std::string_view text) { return RankReport::decode(text); };
  EXPECT_NO_THROW(decode(head + "1\n1\nop\tlabel\tFloat\t8\n"));
  for (const std::string& text :
       {std::string(), std::string("x"), std::string("dead\n5\n0\n0\n"), head + "3\n1\n",
        head + "1\n1\nop\tlabel\n", head + "1\n1\nop\tlabel\tFloat\tmany\n"}) {
    EXPECT_THROW(decode(text), CommError) << text;
  }
}

TEST(RankReportTest, FindsTheFirstDifference) {
  RankReport a = report(Fault::kNone, 5);
  RankReport b = report(Fault::kNone, 5);
  a.record(desc("all_gather", "unit 6"));
  EXPECT_EQ(first_difference(a, b), std::nullopt) << "being ahead is no difference";
  b.record(desc("reduce_scatter", "unit 6"));
  EXPECT_EQ(first_difference(a, b), 6);
}

TEST(RankReportTest, FingerprintsTellCallsApart) {
  const CollectiveDesc base = desc("all_gather", "unit 1");
  for (CollectiveDesc other :
       {desc("reduce_scatter", "unit 1"), desc("all_gather", "unit 2"),
        CollectiveDesc{.op = "all_gather", .label = "unit 1", .dtype = "Half", .numel = 8},
        CollectiveDesc{.op = "all_gather", .label = "unit 1", .dtype = "Float", .numel = 9}}) {
    EXPECT_NE(base.fingerprint(), other.fingerprint()) << other.text();
  }
  EXPECT_LE(base.fingerprint(), 0xffffu);
}

TEST(DiagnoseTest, NamesWhoHasNotArrived) {
  EXPECT_EQ(diagnose(failure(Fault::kTimeout, 2,
                             {report(Fault::kTimeout, 2), RankReport{}, report(Fault::kClosed, 1)})),
            std::string(kSecond) + "ranks 2 and 3 have not arrived within 2 s");
  EXPECT_EQ(diagnose(failure(Fault::kClosed, 2, {report(Fault::kTimeout, 2), RankReport{}})),
            std::string(kSecond) + "rank 2 has not arrived within 2 s");
  RankReport late = report(Fault::kClosed, 2);
  late.waited = std::chrono::milliseconds(1);
  EXPECT_EQ(diagnose(failure(Fault::kTimeout, 2, {late})),
            std::string(kSecond) + "rank 1 has not arrived within 2 s");
  Failure own_lateness = failure(Fault::kClosed, 2, {report(Fault::kTimeout, 2), late});
  own_lateness.reports[0].waited = std::chrono::milliseconds(1);
  EXPECT_EQ(diagnose(own_lateness),
            std::string(kSecond) + "rank 0 came too late: rank 1 had given up after 2 s");
}

TEST(DiagnoseTest, NamesWhoIsGone) {
  EXPECT_EQ(diagnose(failure(Fault::kClosed, 2, {RankReport{}, report(Fault::kClosed, 2)})),
            std::string(kSecond) + "rank 1 is gone (connection closed)");
  Failure slow =
      failure(Fault::kClosed, 2,
              {RankReport{}, RankReport{}});  // neither has reported, and one of them is known to have ended
  slow.gone = {2};
  EXPECT_EQ(diagnose(slow), std::string(kSecond) + "rank 2 is gone (connection closed)");
}

TEST(DiagnoseTest, NamesWhoLeftAndWhy) {
  RankReport left;
  left.left = "boom";
  EXPECT_EQ(diagnose(failure(Fault::kClosed, 2, {left, report(Fault::kClosed, 2)})),
            std::string(kSecond) + "rank 1 left the group: boom");
}

TEST(DiagnoseTest, NamesWhoWentAnotherWay) {
  RankReport other = report(Fault::kTimeout, 1);
  other.record(desc("all_gather", "unit 2"));
  EXPECT_EQ(diagnose(failure(Fault::kTimeout, 2, {report(Fault::kTimeout, 2), other})),
            "collective 2 differs between ranks: rank 0 issued all_reduce of \"unit 2\" (8 x Float), "
            "rank 2 issued all_gather of \"unit 2\" (8 x Float)");
}

TEST(DiagnoseTest, SaysWhenNobodyIsToBlame) {
  EXPECT_EQ(diagnose(failure(Fault::kTimeout, 2, {report(Fault::kClosed, 2)})),
            std::string(kSecond) + "all ranks arrived, but it was not done within 2 s");
  EXPECT_EQ(diagnose(failure(Fault::kClosed, 2, {report(Fault::kTimeout, 3)})),
            std::string(kSecond) + "rank 0 came too late: rank 1 had given up after 2 s");
  EXPECT_EQ(diagnose(failure(Fault::kClosed, 2, {report(Fault::kClosed, 2)})),
            std::string(kSecond) + "a connection between ranks broke (Read error)");
}

TEST(DiagnoseTest, Words) {
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
