// Starting ranks: what they get, and where their output goes.
#include "launcher/launch.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "core/str.h"
#include "launcher/environment/environment.h"
#include "launcher/environment/port.h"
#include "tests/launcher/launch_testing.h"

namespace tessera::launcher {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

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

TEST_F(LaunchTest, TheLimitOfTheRendezvousReachesTheRanks) {
  ASSERT_EQ(run_tool(2, {"env"}, {"--rendezvous-timeout", "7.5"}), 0);
  EXPECT_THAT(folder_.read("env_1"), HasSubstr("\nTESSERA_RENDEZVOUS_TIMEOUT_S=7.5\n"));
  EXPECT_EQ(run_tool(2, {"env"}, {"--rendezvous-timeout", "0"}), 1);
  EXPECT_THAT(errors(), HasSubstr("--rendezvous-timeout 0: expected seconds above 0"));
}

TEST_F(LaunchTest, VariablesAreThoseOfTorchrun) {
  ASSERT_EQ(run_tool(2, {"env"}), 0);
  const std::string env = folder_.read("env_1");  // all of them: EnvironmentTest
  for (const char* line : {"\nRANK=1\n", "\nMASTER_ADDR=127.0.0.1\n"}) EXPECT_THAT(env, HasSubstr(line));
  EXPECT_TRUE(std::regex_search(env, std::regex("\nMASTER_PORT=[1-9][0-9]+\n")));
  EXPECT_TRUE(std::regex_search(env, std::regex("\nTESSERA_RUN_ID=[0-9a-f]{16}\n")));
  std::smatch secret;
  ASSERT_TRUE(std::regex_search(env, secret, std::regex("\nTESSERA_RUN_SECRET=[0-9a-f]{32}\n")));
  EXPECT_THAT(folder_.read("env_0"), HasSubstr(secret.str())) << "the same on all ranks";
  std::ofstream(folder_.path("vars")) << "TESSERA_RUN_SECRET=one of the user's own\n";
  ASSERT_EQ(run_tool(2, {"env"}, {"--env-file", folder_.path("vars")}), 0);
  EXPECT_THAT(folder_.read("env_1"), HasSubstr("\nTESSERA_RUN_SECRET=one of the user's own\n"));
  Tool tool(folder_, launch_args(folder_, 2, {"env"}), {"TMPDIR=" + fs::relative(folder_.path()).string()});
  EXPECT_EQ(tool.wait(), 0) << errors();
  EXPECT_THAT(folder_.read("env_1"), HasSubstr("\nTESSERA_ERROR_FILE=/")) << "for any working folder";
}

TEST_F(LaunchTest, AnEmptySecretIsNone) {
  std::ofstream(folder_.path("vars")) << "TESSERA_RUN_SECRET=\n";
  const std::vector<std::string> given = {"--env-file", folder_.path("vars")};
  for (const auto& [environment, flags] :
       {std::pair<std::vector<std::string>, std::vector<std::string>>{{"TESSERA_RUN_SECRET="}, {}},
        {{}, given},
        {{"TESSERA_RUN_SECRET=known to all that start here"}, given}}) {
    Tool tool(folder_, launch_args(folder_, 2, {"env"}, flags), environment);
    ASSERT_EQ(tool.wait(), 0) << errors();
    const std::string env = folder_.read("env_1");
    EXPECT_TRUE(std::regex_search(env, std::regex("\nTESSERA_RUN_SECRET=[0-9a-f]{32}\n"))) << env;
    EXPECT_THAT(env, Not(HasSubstr("TESSERA_RUN_SECRET=\n")));
  }
}

TEST_F(LaunchTest, ManyRanks) {
  EXPECT_EQ(run_tool(64, {"rendezvous"}), 0);
  EXPECT_EQ(folder_.pids().size(), 64u);
  EXPECT_EQ(run_tool(64, {"fail", "63", "2", "the last one"}), 2);
  EXPECT_THAT(
      errors(),
      ContainsRegex(
          "rank 63 of 64 failed first: exit code 2(, on host [^ ]+ at [0-9:.]+); last error: the last one"));
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

TEST_F(LaunchTest, RanksHaveTheShellsSignals) {
  for (const int signal : {SIGXFSZ, SIGPIPE})
    ::signal(signal, SIG_IGN);  // as the command and the launcher do
  Tool tool(folder_, {"launch", "-n", "1", "--", "grep", "SigIgn", "/proc/self/status"});
  EXPECT_EQ(tool.wait(), 0);
  for (const int signal : {SIGXFSZ, SIGPIPE}) ::signal(signal, SIG_DFL);
  const uint64_t ignored = std::stoull(output().substr(output().find('\t')), nullptr, 16);
  for (const int signal : {SIGXFSZ, SIGPIPE}) EXPECT_EQ(ignored >> (signal - 1) & 1, 0U) << signal;
}

TEST_F(LaunchTest, AFlagCountsOrIsRefused) {
  const std::string first = folder_.path("first.env"), second = folder_.path("second.env");
  std::ofstream(first) << "A=1\nB=1\nTESSERA_RENDEZVOUS_TIMEOUT_S=9\n";
  std::ofstream(second) << "B=2\n";
  EXPECT_EQ(run_tool(1, {"env"},
                     {"--env-file", first, "--env-file", second, "--rendezvous-timeout", "77",
                      "--master-addr", "127.0.0.2"}),
            0)
      << errors();
  for (const char* line : {"A=1", "B=2", "TESSERA_RENDEZVOUS_TIMEOUT_S=77", "MASTER_ADDR=127.0.0.2"})
    EXPECT_THAT("\n" + folder_.read("env_0"), HasSubstr(str("\n", line, "\n")));
  EXPECT_EQ(run_tool(1, {"hang"}, {"--timeout", "0.0001"}), 124);
  std::ofstream(first) << "CUDA_VISIBLE_DEVICES=0\n";
  std::ofstream(second) << "localhost slots=4\n";
  for (const auto& [flags, error] :
       {std::pair<std::vector<std::string>, const char*>{
            {"--ssh-port", "99"},
            "--ssh-port: the ranks are started on this host alone; expected --hostfile or --launcher too"},
        {{"--launcher-args", "x"},
         "--launcher-args: the ranks are started on this host alone; expected --hostfile or --launcher too"},
        {{"--hostfile", second, "--include", "localhost:2,3", "--env-file", first},
         "--env-file: has CUDA_VISIBLE_DEVICES, but the slots of host localhost are 2,3, which are its "
         "devices; expected one of the two"}}) {
    EXPECT_EQ(run_tool(2, {"env"}, flags), 1);
    EXPECT_EQ(errors(), str("error: ", error, "\n"));
  }
}

TEST_F(LaunchTest, AProgramStartsRanksOfItselfOrIsOne) {
  Tool spawner(folder_, {"self", folder_.path(), "--nproc", "3", "--timeout", "259200"});
  EXPECT_EQ(spawner.wait(), 0) << errors();
  EXPECT_TRUE(folder_.has("self_0") && folder_.has("self_1") && folder_.has("self_2"));
  EXPECT_FALSE(folder_.has("self_alone"));
  Tool alone(folder_, {"self", folder_.path(), "--nproc", "1"});
  EXPECT_EQ(alone.wait(), 0);
  EXPECT_TRUE(folder_.has("self_alone"));
  Tool rank(folder_, {"self", folder_.path()}, {"RANK=7", "WORLD_SIZE=8"});
  EXPECT_EQ(rank.wait(), 0);
  EXPECT_TRUE(folder_.has("self_7"));
  Tool contradiction(folder_, {"self", folder_.path(), "--nproc", "2"},
                     {"RANK=1", "WORLD_SIZE=8", "MASTER_ADDR=h", "MASTER_PORT=1"});
  EXPECT_EQ(contradiction.wait(), 1);
  EXPECT_THAT(errors(),
              HasSubstr("error: --nproc 2: this process already is rank 1 of a group with WORLD_SIZE=8"));
  for (const char* flag : {"--timeout", "--save-grace", "--hostfile", "--nnodes"}) {
    Tool of_torchrun(folder_, {"self", folder_.path(), flag, "2"},
                     {"RANK=1", "WORLD_SIZE=8", "MASTER_ADDR=h", "MASTER_PORT=1", "TORCHELASTIC_RUN_ID=id",
                      "TORCHELASTIC_RESTART_COUNT=0"});
    EXPECT_EQ(of_torchrun.wait(), 1);
    EXPECT_THAT(errors(), HasSubstr(str("error: ", flag, ": these ranks were started by torchrun, which ")));
  }
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
