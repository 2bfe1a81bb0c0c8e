// How a run ends: failures of ranks, signals, and the processes that ranks have started.
#include <signal.h>

#include <filesystem>
#include <tuple>

#include "core/environment/finishing.h"
#include "core/str.h"
#include "launcher/failure/failure.h"
#include "tests/launcher/launch_testing.h"

namespace tessera::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Ranks that ignore SIGTERM are killed; rank 0 fails like any other; the last error comes from the log of a
// program that reports none; the cause is the first by time even when it ends last.
TEST_F(LaunchTest, TheFirstFailureIsNamedWithItsLastError) {
  struct {
    int nproc;
    std::vector<std::string> action;
    int rank, code;
    const char* error;
  } const cases[] = {{4, {"fail", "2", "3", "cannot read the data"}, 2, 3, "cannot read the data"},
                     {2, {"fail", "0", "5", "no such model"}, 0, 5, "no such model"},
                     {2, {"fail_quietly", "1", "9", "boom"}, 1, 9, "error: boom"},
                     {4, {"cascade", "3"}, 3, 7, "the real reason"}};
  for (const auto& [nproc, action, rank, code, error] : cases) {
    EXPECT_EQ(run_tool(nproc, action), code);
    EXPECT_THAT(errors(), ContainsRegex(str("rank ", rank, " of ", nproc, " failed first: exit code ", code,
                                            "(, on host [^ ]+ at [0-9:.]+); last error: ", error)));
    EXPECT_TRUE(nothing_runs());
  }
}

TEST_F(LaunchTest, ASignalIsNamedAndGives128PlusItsNumber) {
  for (const auto& [rank, signal, name] :
       {std::tuple(1, SIGSEGV, "SIGSEGV (segmentation fault)"), {0, SIGKILL, "SIGKILL (killed)"}}) {
    EXPECT_EQ(run_tool(3, {"raise", std::to_string(rank), std::to_string(signal)}), 128 + signal);
    EXPECT_THAT(errors(), HasSubstr(str("rank ", rank, " of 3 failed first: ", name)));
    EXPECT_THAT(errors(), Not(HasSubstr("the log of rank"))) << "without other lines it is not kept";
    EXPECT_TRUE(std::filesystem::is_empty(temporary_.path()));
    EXPECT_TRUE(nothing_runs());
  }
}

/// core/environment/finishing.h
TEST_F(LaunchTest, AProcessThatFinishesWhatARankHasBegunIsWaitedFor) {
  for (const bool finishes : {false, true}) {
    const Folder folder;
    Tool tool(folder, launch_args(folder, 1, {"leave_behind"}),
              {str(kFinishesVariable, "=", finishes ? 1 : 0)});
    EXPECT_EQ(tool.wait(), 3);
    EXPECT_EQ(folder.has("finished_0"), finishes);
  }
}

TEST_F(LaunchTest, KilledFromOutside) {
  Tool tool(folder_, launch_args(folder_, 3, {"hang"}));
  ASSERT_TRUE(folder_.wait_for("ready", 3));
  ::kill(std::stoi(folder_.read("pid_2")), SIGKILL);
  EXPECT_EQ(tool.wait(), 137);
  EXPECT_THAT(errors(), HasSubstr("rank 2 of 3 failed first: SIGKILL"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, SigtermLeavesTimeToSave) {
  Tool tool(folder_, launch_args(folder_, 2, {"save", "2500"}));  // more than after a failure
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait(), 0) << "the ranks have saved and exited with 0";
  EXPECT_TRUE(folder_.has("saved_0"));
  EXPECT_TRUE(folder_.has("saved_1"));
  EXPECT_THAT(errors(), Not(HasSubstr("failed")));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, CrashAfterSigtermIsAFailure) {
  Tool tool(folder_, launch_args(folder_, 2, {"save", "0", "crash"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait(), 128 + SIGSEGV);
  EXPECT_THAT(errors(), HasSubstr("rank 1 of 2 failed first: SIGSEGV (segmentation fault)"));
  EXPECT_TRUE(nothing_runs());
}

// They come to the ranks as SIGTERM.
TEST_F(LaunchTest, SignalsThatWouldEndTheLauncherLeaveTimeToSave) {
  for (const int signal : {SIGHUP, SIGQUIT, SIGALRM, SIGVTALRM, SIGXCPU, SIGPWR}) {
    const Folder folder;
    Tool tool(folder, launch_args(folder, 2, {"save", "0"}));
    ASSERT_TRUE(folder.wait_for("ready", 2));
    tool.signal(signal);
    EXPECT_EQ(tool.wait(), 0);
    EXPECT_TRUE(folder.has("saved_0") && folder.has("saved_1"));
    EXPECT_THAT(folder.read("tool.err"), HasSubstr(signal_name(signal) + ": 2 ranks have 30 s to end"));
  }
}

TEST_F(LaunchTest, TheUsersSignalsGoToTheRanksAndTheRunGoesOn) {
  Tool tool(folder_, launch_args(folder_, 2, {"take_signals", "3"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  std::string expected;
  for (const int signal : {SIGUSR1, SIGUSR2, SIGUSR1}) {
    EXPECT_EQ(tool.wait(0.3), -1) << "it goes on";
    tool.signal(signal);
    expected += str(signal, " ");
    for (const char* name : {"signals_0", "signals_1"})
      for (int tries = 0; tries < 1000 && (!folder_.has(name) || folder_.read(name) != expected); ++tries)
        ::usleep(5000);
  }
  EXPECT_EQ(tool.wait(), 0);
  for (const char* name : {"signals_0", "signals_1"}) EXPECT_EQ(folder_.read(name), expected);
  EXPECT_THAT(errors(), HasSubstr("SIGUSR2: passed on to 2 ranks"));
}

TEST_F(LaunchTest, TheUsersSignalsWaitForAHandler) {
  Tool tool(folder_, launch_args(folder_, 2, {"take_signals", "2", "1000"}));
  ASSERT_TRUE(folder_.wait_for("started", 2));
  for (const int signal : {SIGUSR2, SIGUSR1}) tool.signal(signal);
  EXPECT_EQ(tool.wait(), 0);
  for (const char* name : {"signals_0", "signals_1"})
    EXPECT_THAT(folder_.read(name), AllOf(HasSubstr(str(SIGUSR1)), HasSubstr(str(SIGUSR2))));
  EXPECT_THAT(errors(), HasSubstr("SIGUSR1: passed on to 0 ranks; 2 without a handler would end"));
  const Folder folder;
  Tool never(folder, launch_args(folder, 2, {"hang"}));
  ASSERT_TRUE(folder.wait_for("ready", 2));
  never.signal(SIGUSR1);
  EXPECT_EQ(never.wait(1), -1) << "it goes on";
  never.signal(SIGTERM);
  EXPECT_EQ(never.wait(), 128 + SIGTERM);
}

TEST_F(LaunchTest, SignalsToHandleAreTorchruns) {
  for (const auto& [flag, sent, got] : {std::tuple(" SIGTERM, SIGUSR1", SIGUSR1, SIGUSR1),
                                        {"SIGUSR1,SIGUSR2", SIGUSR2, SIGUSR2},
                                        {"SIGUSR1", SIGHUP, SIGTERM},
                                        {"SIGUSR1", SIGINT, SIGINT}}) {
    const Folder folder;
    Tool tool(folder, launch_args(folder, 2, {"take_signals", "9"},
                                  {"--signals-to-handle", flag, "--save-grace", "0.5"}));
    ASSERT_TRUE(folder.wait_for("ready", 2));
    tool.signal(sent);
    EXPECT_EQ(tool.wait(), 128 + sent) << "killed after the grace";
    EXPECT_EQ(folder.read("signals_1"), str(got, " "));
    EXPECT_THAT(folder.read("tool.err"), HasSubstr(signal_name(sent) + ": 2 ranks have 0.5 s to end"));
  }
  EXPECT_EQ(run_tool(1, {"ok"}, {"--signals-to-handle", "SIGUSR1,SIGKILL"}), 1);
  EXPECT_THAT(errors(), HasSubstr("--signals-to-handle: found 'SIGKILL'; expected some of SIGTERM,SIGINT,"));
}

TEST_F(LaunchTest, RanksThatIgnoreSigtermAreKilledAfterTheGrace) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const Folder folder;
    Tool tool(folder, launch_args(folder, 2, {"hang", "stubborn"}, {"--save-grace", "0.5"}));
    ASSERT_TRUE(folder.wait_for("ready", 2));
    tool.signal(signal);
    EXPECT_EQ(tool.wait(), 128 + signal);
    EXPECT_THAT(folder.read("tool.err"), HasSubstr("2 ranks did not end in time and are killed"));
    EXPECT_TRUE(all_gone(folder.pids()));
  }
}

TEST_F(LaunchTest, SecondInterruptKillsAtOnceButNotOneSentTwice) {
  Tool tool(folder_, launch_args(folder_, 2, {"hang", "stubborn"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGINT);
  ::usleep(20'000);
  tool.signal(SIGINT);  // as `timeout -s INT` does
  EXPECT_EQ(tool.wait(0.6), -1);
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), 130);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, CrashWhileSavingDoesNotDelayTheEnd) {
  Tool tool(folder_, launch_args(folder_, 2, {"hang", "stubborn"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGTERM);
  ::usleep(200'000);
  ::kill(std::stoi(folder_.read("pid_0")), SIGKILL);
  EXPECT_EQ(tool.wait(), 143);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, NothingOutlivesTheRanks) {
  EXPECT_EQ(run_tool(2, {"family", "0"}), 0);
  EXPECT_EQ(folder_.pids().size(), 6u);  // 2 ranks, each with a child and a daemon in its own session
  EXPECT_TRUE(nothing_runs());
  EXPECT_EQ(run_tool(2, {"family", "6"}), 6);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, NothingOutlivesAnInterrupt) {
  Tool tool(folder_, launch_args(folder_, 2, {"family", "hang"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), 130);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, SigkillOfTheLauncherLeavesNoRankAndNoChildOfOne) {
  Tool tool(folder_, launch_args(folder_, 3, {"family", "hang"}));
  ASSERT_TRUE(folder_.wait_for("ready", 3));
  tool.signal(SIGKILL);
  EXPECT_EQ(tool.wait(), 1000 + SIGKILL);
  // A daemon in its own session cannot be found then; everything in the ranks' groups is killed.
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank)
    for (const char* name : {"pid_", "pid_child_"}) pids.push_back(std::stoi(folder_.read(str(name, rank))));
  EXPECT_TRUE(all_gone(pids));
  for (const pid_t pid : folder_.pids()) ::kill(pid, SIGKILL);
  for (int tries = 0; tries < 2000 && !std::filesystem::is_empty(temporary_.path()); ++tries)
    ::usleep(10'000);
  EXPECT_TRUE(std::filesystem::is_empty(temporary_.path())) << "of the run's files";
}

}  // namespace
}  // namespace tessera::launcher
