// The launcher with real processes; tests/launcher/test_rank.cc defines the actions.
#include "launcher/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <regex>

#include "core/error.h"
#include "core/str.h"
#include "launcher/environment.h"
#include "launcher/port.h"
#include "tests/launcher/tool.h"

namespace tessera::launcher {
namespace {

namespace fs = std::filesystem;
using testing::all_gone;
using testing::Folder;
using ::testing::HasSubstr;
using testing::launch_args;
using ::testing::Not;
using testing::Tool;

class LaunchTest : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("TMPDIR", temporary_.path().c_str(), 1); }
  void TearDown() override { ::unsetenv("TMPDIR"); }

  /// Runs to the end and returns the exit code.
  int run_tool(int nproc, const std::vector<std::string>& action,
               const std::vector<std::string>& flags = {}) {
    Tool tool(folder_, launch_args(folder_, nproc, action, flags));
    return tool.wait();
  }
  std::string errors() const { return folder_.read("tool.err"); }
  std::string output() const { return folder_.read("tool.out"); }
  bool nothing_runs(double seconds = 1) const { return all_gone(folder_.pids(), seconds); }
  std::string refusal(const Options& options) const {
    try {
      run(options, Logger());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  Folder folder_;     // the ranks' files
  Folder temporary_;  // the launcher's TMPDIR
};

TEST_F(LaunchTest, RankZeroPrintsAndTheOthersLog) {
  EXPECT_EQ(run_tool(3, {"ok"}, {"--log-dir", folder_.path("logs/deep")}), 0);
  EXPECT_EQ(output(), "out 0\n");
  EXPECT_EQ(errors(), "err 0\n");
  EXPECT_EQ(folder_.read("logs/deep/rank_00001.log"), "out 1\nerr 1\n");
  EXPECT_EQ(folder_.read("logs/deep/rank_00002.log"), "out 2\nerr 2\n");
  EXPECT_FALSE(folder_.has("logs/deep/rank_00000.log"));
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
}

TEST_F(LaunchTest, TemporaryLogsAreRemovedOnSuccessAndKeptOnFailure) {
  EXPECT_EQ(run_tool(2, {"ok"}), 0);
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
  EXPECT_EQ(run_tool(2, {"fail_quietly", "1", "4", "boom"}), 4);
  std::smatch match;
  const std::string text = errors();
  ASSERT_TRUE(std::regex_search(text, match, std::regex("the log of rank 1 is (\\S+)"))) << text;
  std::ifstream log(match[1]);
  std::string line;
  std::getline(log, line);
  EXPECT_EQ(line, "error: boom");
}

// The errors are 0.3 s apart: the launcher does not end the other ranks before they have reported theirs.
TEST_F(LaunchTest, ErrorOfAllRanksIsPrintedOnceAndNoLogIsKept) {
  EXPECT_EQ(run_tool(3, {"fail_alike", "4", "data.path: no such folder"}), 4);
  EXPECT_EQ(errors(), "error: data.path: no such folder\n");
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
}

TEST_F(LaunchTest, LogWithoutOtherLinesIsNotKept) {
  EXPECT_EQ(run_tool(2, {"raise", "0", std::to_string(SIGKILL)}), 128 + SIGKILL);
  EXPECT_EQ(errors().find("the log of rank"), std::string::npos) << errors();
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
}

TEST_F(LaunchTest, TheLimitOfTheRendezvousReachesTheRanks) {
  ASSERT_EQ(run_tool(2, {"env"}, {"--rendezvous-timeout", "7.5"}), 0);
  EXPECT_THAT(folder_.read("env_1"), HasSubstr("\nTESSERA_RENDEZVOUS_TIMEOUT_S=7.5\n"));
  EXPECT_EQ(run_tool(2, {"env"}, {"--rendezvous-timeout", "0"}), 1);
  EXPECT_THAT(errors(), HasSubstr("--rendezvous-timeout 0: expected seconds above 0"));
}

TEST_F(LaunchTest, VariablesAreThoseOfTorchrun) {
  ASSERT_EQ(run_tool(2, {"env"}), 0);
  const std::string env = folder_.read("env_1");
  for (const char* line : {"\nRANK=1\n", "\nWORLD_SIZE=2\n", "\nLOCAL_RANK=1\n", "\nLOCAL_WORLD_SIZE=2\n",
                           "\nGROUP_RANK=0\n", "\nMASTER_ADDR=127.0.0.1\n", "\nOMP_NUM_THREADS="})
    EXPECT_THAT(env, HasSubstr(line));
  EXPECT_TRUE(std::regex_search(env, std::regex("\nMASTER_PORT=[1-9][0-9]+\n")));
  EXPECT_TRUE(std::regex_search(env, std::regex("\nTESSERA_RUN_ID=[0-9a-f]{16}\n")));
}

TEST_F(LaunchTest, FirstFailureIsNamedAndRanksThatIgnoreSigtermAreKilled) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(run_tool(4, {"fail", "2", "3", "cannot read the data"}), 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_THAT(errors(),
              HasSubstr("rank 2 of 4 failed first: exit code 3; last error: cannot read the data\n"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, LastErrorComesFromTheLogOfAProgramThatReportsNone) {
  EXPECT_EQ(run_tool(2, {"fail_quietly", "1", "9", "boom"}), 9);
  EXPECT_THAT(errors(), HasSubstr("rank 1 of 2 failed first: exit code 9; last error: error: boom\n"));
}

TEST_F(LaunchTest, RankZeroFailsLikeAnyOther) {
  EXPECT_EQ(run_tool(2, {"fail", "0", "5", "no such model"}), 5);
  EXPECT_THAT(errors(), HasSubstr("rank 0 of 2 failed first: exit code 5; last error: no such model\n"));
}

TEST_F(LaunchTest, TheCauseIsTheFirstByTimeEvenWhenItEndsLast) {
  EXPECT_EQ(run_tool(4, {"cascade", "3"}), 7);
  EXPECT_THAT(errors(), HasSubstr("rank 3 of 4 failed first: exit code 7; last error: the real reason\n"));
}

TEST_F(LaunchTest, ASignalIsNamedAndGives128PlusItsNumber) {
  EXPECT_EQ(run_tool(3, {"raise", "1", std::to_string(SIGSEGV)}), 128 + SIGSEGV);
  EXPECT_THAT(errors(), HasSubstr("rank 1 of 3 failed first: SIGSEGV (segmentation fault)"));
  EXPECT_TRUE(nothing_runs());
  EXPECT_EQ(run_tool(2, {"raise", "0", std::to_string(SIGKILL)}), 128 + SIGKILL);
  EXPECT_THAT(errors(), HasSubstr("rank 0 of 2 failed first: SIGKILL (killed)"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, KilledFromOutside) {
  Tool tool(folder_, launch_args(folder_, 3, {"hang"}));
  ASSERT_TRUE(folder_.wait_for("ready", 3));
  ::kill(std::stoi(folder_.read("pid_2")), SIGKILL);
  EXPECT_EQ(tool.wait(5), 137);
  EXPECT_THAT(errors(), HasSubstr("rank 2 of 3 failed first: SIGKILL"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, SigtermLeavesTimeToSave) {
  Tool tool(folder_, launch_args(folder_, 2, {"save", "2500"}));  // more than after a failure
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait(10), 0) << "the ranks have saved and exited with 0";
  EXPECT_TRUE(folder_.has("saved_0"));
  EXPECT_TRUE(folder_.has("saved_1"));
  EXPECT_THAT(errors(), Not(HasSubstr("failed")));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, CrashAfterSigtermIsAFailure) {
  Tool tool(folder_, launch_args(folder_, 2, {"save", "0", "crash"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGTERM);
  EXPECT_EQ(tool.wait(10), 128 + SIGSEGV);
  EXPECT_THAT(errors(), HasSubstr("rank 1 of 2 failed first: SIGSEGV (segmentation fault)"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, HangupIsForwardedAsSigterm) {
  Tool tool(folder_, launch_args(folder_, 2, {"save", "0"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGHUP);
  EXPECT_EQ(tool.wait(10), 0);
  EXPECT_TRUE(folder_.has("saved_0"));
}

TEST_F(LaunchTest, RanksThatIgnoreSigtermAreKilledAfterTheGrace) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const Folder folder;
    Tool tool(folder, launch_args(folder, 2, {"hang", "stubborn"}, {"--save-grace", "0.5"}));
    ASSERT_TRUE(folder.wait_for("ready", 2));
    tool.signal(signal);
    EXPECT_EQ(tool.wait(5), 128 + signal);
    EXPECT_THAT(folder.read("tool.err"), HasSubstr("2 ranks did not end in time and are killed"));
    EXPECT_TRUE(all_gone(folder.pids(), 1));
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
  EXPECT_EQ(tool.wait(2), 130);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, CrashWhileSavingDoesNotDelayTheEnd) {
  Tool tool(folder_, launch_args(folder_, 2, {"hang", "stubborn"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  tool.signal(SIGTERM);
  ::usleep(200'000);
  ::kill(std::stoi(folder_.read("pid_0")), SIGKILL);
  EXPECT_EQ(tool.wait(5), 143);
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
  EXPECT_EQ(tool.wait(5), 130);
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, SigkillOfTheLauncherLeavesNoRankAndNoChildOfOne) {
  Tool tool(folder_, launch_args(folder_, 3, {"family", "hang"}));
  ASSERT_TRUE(folder_.wait_for("ready", 3));
  tool.signal(SIGKILL);
  EXPECT_EQ(tool.wait(5), 1000 + SIGKILL);
  // A daemon in its own session cannot be found then; everything in the ranks' groups is killed.
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank)
    for (const char* name : {"pid_", "pid_child_"}) pids.push_back(std::stoi(folder_.read(str(name, rank))));
  EXPECT_TRUE(all_gone(pids, 3));
  for (const pid_t pid : folder_.pids()) ::kill(pid, SIGKILL);
}

TEST_F(LaunchTest, ManyRanks) {
  EXPECT_EQ(run_tool(64, {"rendezvous"}), 0);
  EXPECT_EQ(folder_.pids().size(), 64u);
  EXPECT_EQ(run_tool(64, {"fail", "63", "2", "the last one"}), 2);
  EXPECT_THAT(errors(), HasSubstr("rank 63 of 64 failed first: exit code 2; last error: the last one"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, StdinIsRankZeros) {
  std::ofstream(folder_.path("input")) << "some text";
  Tool tool(folder_, launch_args(folder_, 2, {"read_stdin"}), {}, folder_.path("input"));
  EXPECT_EQ(tool.wait(), 0);
  EXPECT_EQ(folder_.read("stdin_0"), "some text");
  EXPECT_EQ(folder_.read("stdin_1"), "");
}

TEST_F(LaunchTest, ArgumentsReachTheProgramUnchanged) {
  Tool tool(folder_, {"launch", "-n", "1", "--", "printf", "[%s]", "--nproc", "3", "--", "launch", "", "a b",
                      "--help"});
  EXPECT_EQ(tool.wait(), 0) << errors();
  EXPECT_EQ(output(), "[--nproc][3][--][launch][][a b][--help]");
}

TEST_F(LaunchTest, MissingProgramOrFlagIsExplained) {
  const std::string expected = "; expected: tessera launch -n N [flags] -- PROGRAM [ARGS...]\n";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"launch", "-n", "2"}, "error: launch: no program was given"},
      {{"launch", "-n", "2", "--"}, "error: launch: no program was given"},
      {{"launch", "-n", "2", "true"}, "error: launch: unexpected 'true'"},
      {{"launch", "--ranks", "2", "--", "true"}, "error: launch: unexpected '--ranks'"},
  };
  for (const auto& [args, error] : cases) {
    Tool tool(folder_, args);
    EXPECT_EQ(tool.wait(), 1);
    EXPECT_EQ(errors(), error + expected);
  }
}

TEST_F(LaunchTest, ThePortIsHeldAndRankZeroCanServeOnIt) {
  const PortReservation held(0);
  EXPECT_GT(held.port(), 0);
  EXPECT_EQ(run_tool(2, {"rendezvous"}), 0);  // on a free port
  EXPECT_EQ(run_tool(2, {"rendezvous"}, {"--master-port", std::to_string(held.port())}), 0);
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::listen(listener, 1), 0);  // binds it to a free port
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  const int port = ntohs(address.sin_port);
  EXPECT_EQ(run_tool(2, {"ok"}, {"--master-port", std::to_string(port)}), 1);
  EXPECT_EQ(errors(), str("error: port ", port,
                          " cannot be used for the rendezvous: Address already in use; "
                          "choose another with --master-port, or leave it out for a free one\n"));
  ::close(listener);
}

TEST_F(LaunchTest, ProgramThatCannotBeStartedIsAOneLineError) {
  Tool tool(folder_, {"launch", "-n", "2", "--", "./no_such_program", "x"});
  EXPECT_EQ(tool.wait(), 1);
  EXPECT_EQ(errors(), "error: cannot start './no_such_program': No such file or directory\n");
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
  Options options;
  options.program = folder_.path();
  EXPECT_THAT(refusal(options), HasSubstr("Permission denied"));
  options.program = "true";
  for (const int nproc : {0, -1, kMaxRanks + 1}) {
    options.nproc = nproc;
    EXPECT_THAT(refusal(options), HasSubstr(str("--nproc ", nproc, ": expected 1 to 4096")));
  }
  options.nproc = 2;
  options.master_port = 65536;
  EXPECT_THAT(refusal(options), HasSubstr("--master-port 65536"));
  options.master_port = 0;
  options.log_dir = "/dev/null/logs";
  EXPECT_THAT(refusal(options), HasSubstr("--log-dir /dev/null/logs"));
  options.log_dir = "";
  options.program = "";
  EXPECT_THAT(refusal(options), HasSubstr("no program"));
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
}

TEST_F(LaunchTest, AProgramStartsRanksOfItselfOrIsOne) {
  Tool spawner(folder_, {"self", folder_.path(), "--nproc", "3"});
  EXPECT_EQ(spawner.wait(), 0) << errors();
  EXPECT_TRUE(folder_.has("self_0") && folder_.has("self_1") && folder_.has("self_2"));
  EXPECT_FALSE(folder_.has("self_alone"));
  Tool alone(folder_, {"self", folder_.path(), "--nproc", "1"});
  EXPECT_EQ(alone.wait(), 0);
  EXPECT_TRUE(folder_.has("self_alone"));
  Tool rank(folder_, {"self", folder_.path()}, {"RANK=7", "WORLD_SIZE=8"});
  EXPECT_EQ(rank.wait(), 0);
  EXPECT_TRUE(folder_.has("self_7"));
  Tool contradiction(folder_, {"self", folder_.path(), "--nproc", "2"}, {"RANK=1", "WORLD_SIZE=8"});
  EXPECT_EQ(contradiction.wait(), 1);
  EXPECT_THAT(errors(),
              HasSubstr("error: --nproc 2: this process already is rank 1 of a group with WORLD_SIZE=8"));
}

TEST_F(LaunchTest, FiftyRunsLeaveNoDescriptorZombieOrFile) {
  const auto num_descriptors = [] { return std::distance(fs::directory_iterator("/proc/self/fd"), {}); };
  Options options;
  options.nproc = 3;
  options.program = "true";
  ASSERT_EQ(run(options, Logger()), 0);
  const auto before = num_descriptors();
  sigset_t mask_before, mask_after;
  ::sigprocmask(SIG_BLOCK, nullptr, &mask_before);
  for (int i = 0; i < 50; ++i) {
    options.program = i % 2 ? "false" : "true";
    ASSERT_EQ(run(options, Logger()), i % 2);
    if (i % 2)
      for (const auto& entry : fs::directory_iterator(temporary_.path()))
        fs::remove_all(entry);  // logs of a failure
  }
  EXPECT_EQ(num_descriptors(), before);
  ::sigprocmask(SIG_BLOCK, nullptr, &mask_after);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGHUP, SIGTSTP})
    EXPECT_EQ(::sigismember(&mask_before, signal), ::sigismember(&mask_after, signal)) << signal;
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  EXPECT_TRUE(fs::is_empty(temporary_.path()));
}

}  // namespace
}  // namespace tessera::launcher
