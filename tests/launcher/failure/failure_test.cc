#include "launcher/failure/failure.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace tessera::launcher {
namespace {

constexpr int64_t kMs = 1'000'000;

int exited(int code) { return code << 8; }

RankExit at(int rank, int status, int64_t ms) { return {rank, status, ms * kMs, false, std::nullopt}; }

RankExit reported(int rank, int status, int64_t ms, int64_t report_ms) {
  return {rank, status, ms * kMs, false, ErrorReport{report_ms * kMs, "error"}};
}

RankExit told(RankExit exit) {
  exit.signalled = true;
  return exit;
}

int cause(const std::vector<RankExit>& exits) {
  const RankExit* first = root_cause(exits);
  return first ? first->rank : -1;
}

TEST(FailureTest, SuccessHasNoCause) {
  EXPECT_EQ(cause({}), -1);
  EXPECT_EQ(cause({at(0, 0, 1), reported(1, 0, 2, 1)}), -1);
}

TEST(FailureTest, ErrorReportedByAllRanks) {
  EXPECT_EQ(common_error({reported(0, exited(1), 9, 8), reported(1, exited(1), 7, 6)}), "error");
  EXPECT_EQ(common_error({reported(0, exited(1), 9, 8), told(reported(1, SIGTERM, 7, 6))}), "error");
  EXPECT_EQ(common_error({reported(0, exited(1), 9, 8), at(1, exited(1), 7)}), std::nullopt);
  EXPECT_EQ(common_error({at(1, exited(1), 7), reported(0, exited(1), 9, 8)}), std::nullopt);
  RankExit other = reported(1, exited(1), 7, 6);
  other.report->message = "another";
  EXPECT_EQ(common_error({reported(0, exited(1), 9, 8), other}), std::nullopt);
  EXPECT_EQ(common_error({reported(0, exited(1), 9, 8), reported(1, 0, 7, 6)}), std::nullopt);
  EXPECT_EQ(common_error({}), std::nullopt);
}

TEST(FailureTest, FirstByTimeNotByRankOrOrder) {
  EXPECT_EQ(cause({at(0, exited(1), 20), at(1, exited(2), 10)}), 1);
  // Rank 2 reported first, although it ended last.
  EXPECT_EQ(
      cause({reported(0, exited(1), 10, 9), reported(1, exited(1), 11, 8), reported(2, exited(5), 500, 3)}),
      2);
}

TEST(FailureTest, ARankThatBlamesAnotherIsTheCauseOnlyAlone) {
  RankExit early = reported(0, exited(1), 2, 1), late = reported(1, exited(1), 900, 500);
  late.report->message = "rank 0 is gone (a broken pipe of its own)";  // words decide nothing
  early.report->of_peer = true;
  EXPECT_EQ(cause({early, at(1, exited(3), 900)}), 1);
  EXPECT_EQ(cause({early, late}), 1);
  EXPECT_EQ(cause({at(1, 0, 1), early}), 0);
  late.report->of_peer = true;
  EXPECT_EQ(cause({late, early}), 0);
}

TEST(FailureTest, KilledRankIsTheCauseBeforeItsPeersReports) {
  // Rank 1 noticed the closed connection and reported it before the launcher noticed rank 0's death.
  EXPECT_EQ(cause({reported(1, exited(1), 1005, 1001), at(0, SIGKILL, 1006)}), 0);
  EXPECT_EQ(cause({at(1, exited(1), 1005), at(0, SIGSEGV | 0x80, 1006)}), 0);  // 0x80: with a core file
  // Not a crash long after the first error, nor an abort, which a closed connection can cause.
  EXPECT_EQ(cause({reported(1, exited(1), 1005, 1001), at(0, SIGSEGV, 2000)}), 1);
  EXPECT_EQ(cause({at(1, exited(1), 1005), at(0, SIGABRT, 1006)}), 1);
}

TEST(FailureTest, RankEndedByTheLauncherIsNoCauseUnlessItHadReported) {
  EXPECT_EQ(cause({told(at(0, SIGTERM, 5)), at(1, exited(3), 10)}), 1);
  const RankExit slow = told(reported(0, SIGKILL, 3000, 1));
  EXPECT_EQ(cause({at(1, exited(3), 10), slow}), 0);
  EXPECT_EQ(exit_code(slow), 1);
}

TEST(FailureTest, CodesAndNames) {
  EXPECT_EQ(exit_code(at(0, exited(3), 0)), 3);
  EXPECT_EQ(exit_code(at(0, SIGSEGV, 0)), 139);
  EXPECT_EQ(exit_code(told(at(0, SIGSEGV, 0))), 139);
  EXPECT_EQ(describe_status(exited(3)), "exit code 3");
  EXPECT_EQ(describe_status(SIGSEGV), "SIGSEGV (segmentation fault)");
  EXPECT_EQ(describe_status(SIGKILL), "SIGKILL (killed)");
  EXPECT_EQ(describe_status(SIGRTMIN + 3), "signal " + std::to_string(SIGRTMIN + 3));
}

}  // namespace
}  // namespace tessera::launcher
