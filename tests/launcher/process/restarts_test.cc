// Restarts: the decision, as a pure function, and processes that are started again.
#include "launcher/process/restarts.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "core/str.h"
#include "tests/launcher/launch_testing.h"

namespace tessera::launcher {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kKilled = 128 + SIGKILL;

RestartPolicy ranks(int num, int max_restarts, int fewest = 0) {
  RestartPolicy policy{.max_restarts = max_restarts, .fewest = fewest};
  for (int rank = 0; rank < num; ++rank) policy.members.push_back({str("rank ", rank), 1});
  return policy;
}

/// Arguments only for numbers of ranks that divide `batch`.
void divide(RestartPolicy& policy, int batch) {
  policy.arguments = [batch](int num) -> std::optional<std::vector<std::string>> {
    if (batch % num != 0) return std::nullopt;
    return std::vector<std::string>{std::to_string(num)};
  };
}

TEST(RestartsTest, AFailureIsRestartedUntilAllAreUsed) {
  const RestartPolicy policy = ranks(2, 2);
  const Attempt first = first_attempt(policy);
  EXPECT_THAT(first.members, ElementsAre(0, 1));
  const NextStep second = next_step(policy, first, {.exit_code = 3});
  ASSERT_TRUE(second.attempt);
  EXPECT_EQ(second.attempt->restart_count, 1);
  EXPECT_EQ(second.message, "restart 1 of 2: 2 ranks");
  const NextStep third = next_step(policy, *second.attempt, {.exit_code = 3});
  ASSERT_TRUE(third.attempt);
  EXPECT_EQ(third.attempt->restart_count, 2);
  const NextStep end = next_step(policy, *third.attempt, {.exit_code = 3});
  EXPECT_FALSE(end.attempt);
  EXPECT_EQ(end.message, "not restarted: --max-restarts 2 is used up");
}

TEST(RestartsTest, WhatIsNotRestarted) {
  const RestartPolicy policy = ranks(2, 5);
  const Attempt first = first_attempt(policy);
  EXPECT_FALSE(next_step(policy, first, {.exit_code = 0}).attempt);
  EXPECT_FALSE(next_step(policy, first, {.exit_code = 130, .was_asked = true}).attempt);
  const NextStep mistake = next_step(policy, first, {.exit_code = 1, .would_recur = true});
  EXPECT_FALSE(mistake.attempt);
  EXPECT_EQ(mistake.message, "not restarted: the same error would occur again");
  const Attempt second = *next_step(policy, first, {.exit_code = kKilled}).attempt;
  const NextStep once = next_step(policy, second, {.exit_code = 1, .would_recur = true});
  ASSERT_TRUE(once.attempt) << "the first attempt had none";
  EXPECT_EQ(next_step(policy, *once.attempt, {.exit_code = 1, .would_recur = true}).message, mistake.message);
  const Attempt other = *next_step(policy, *once.attempt, {.exit_code = 1}).attempt;
  EXPECT_TRUE(next_step(policy, other, {.exit_code = 1, .would_recur = true}).attempt);
  const NextStep never = next_step(ranks(2, 0), first, {.exit_code = 1});
  EXPECT_FALSE(never.attempt);
  EXPECT_EQ(never.message, "");
}

TEST(RestartsTest, LostMembersAreLeftOutDownToTheFewest) {
  const RestartPolicy policy = ranks(4, 9, 2);
  const NextStep three = next_step(policy, first_attempt(policy), {.exit_code = kKilled, .lost = {1}});
  ASSERT_TRUE(three.attempt);
  EXPECT_THAT(three.attempt->members, ElementsAre(0, 2, 3));
  EXPECT_EQ(three.message, "restart 1 of 9: 3 ranks instead of 4, without rank 1");
  // The second of these three is rank 2 of the first attempt.
  const NextStep two = next_step(policy, *three.attempt, {.exit_code = kKilled, .lost = {1, 2}});
  ASSERT_TRUE(two.attempt);
  EXPECT_THAT(two.attempt->members, ElementsAre(0, 3));
  const NextStep again = next_step(policy, *two.attempt, {.exit_code = kKilled, .lost = {0, 1}});
  ASSERT_TRUE(again.attempt);
  EXPECT_THAT(again.attempt->members, ElementsAre(0, 3));
  // An exit code is no loss; without a range nothing is left out.
  EXPECT_THAT(next_step(policy, first_attempt(policy), {.exit_code = 1}).attempt->members,
              ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(next_step(ranks(3, 1), first_attempt(ranks(3, 1)), {.exit_code = kKilled, .lost = {0}})
                  .attempt->members,
              ElementsAre(0, 1, 2));
}

TEST(RestartsTest, TheNextLowerNumberThatTheProgramCanRunOn) {
  RestartPolicy policy = ranks(4, 9, 1);
  divide(policy, 8);
  const NextStep two = next_step(policy, first_attempt(policy), {.exit_code = kKilled, .lost = {0}});
  ASSERT_TRUE(two.attempt);
  EXPECT_THAT(two.attempt->members, ElementsAre(1, 2));
  EXPECT_EQ(two.attempt->arguments->front(), "2");
  EXPECT_EQ(two.message, "restart 1 of 9: 2 ranks instead of 4, without rank 0, rank 3");
  // 3 ranks do not divide 8, and 2 are too few: all 4 again.
  policy.fewest = 3;
  const NextStep four = next_step(policy, first_attempt(policy), {.exit_code = kKilled, .lost = {0}});
  ASSERT_TRUE(four.attempt);
  EXPECT_THAT(four.attempt->members, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(four.attempt->arguments->front(), "4");
}

TEST(RestartsTest, HostsCountTheirRanks) {
  RestartPolicy policy{.max_restarts = 1, .fewest = 1};
  policy.members = {{"host n1", 2}, {"host n2", 1}, {"host n3", 1}};
  divide(policy, 12);
  const NextStep next = next_step(policy, first_attempt(policy), {.exit_code = 255, .lost = {1}});
  ASSERT_TRUE(next.attempt);
  EXPECT_EQ(next.message, "restart 1 of 1: 3 ranks instead of 4, without host n2");
  EXPECT_EQ(next.attempt->arguments->front(), "3");
}

// ---------------------------------------------------------------------------------------- with processes

TEST_F(LaunchTest, RanksAreStartedAgainWithTorchrunsVariables) {
  EXPECT_EQ(run_tool(2, {"fail_until", "2", "3"}, {"--max-restarts", "3"}), 0);
  EXPECT_THAT(errors(), HasSubstr("warning: restart 1 of 3: 2 ranks\n"));
  EXPECT_THAT(errors(), HasSubstr("warning: restart 2 of 3: 2 ranks\n"));
  EXPECT_THAT(errors(), Not(HasSubstr("restart 3")));
  const auto variable = [&](int restart, const char* name) {
    const std::string env = folder_.read(str("env_0_", restart));
    std::smatch found;
    std::regex_search(env, found, std::regex(str("\n", name, "=([^\n]*)\n")));
    return found.empty() ? std::string() : found[1].str();
  };
  for (int restart = 0; restart <= 2; ++restart) {
    EXPECT_EQ(variable(restart, "TORCHELASTIC_RESTART_COUNT"), std::to_string(restart));
    EXPECT_EQ(variable(restart, "TORCHELASTIC_MAX_RESTARTS"), "3");
    EXPECT_EQ(variable(restart, "WORLD_SIZE"), "2");
    EXPECT_EQ(variable(restart, "TESSERA_RUN_ID"), variable(0, "TESSERA_RUN_ID"));
    EXPECT_NE(variable(restart, "TORCHELASTIC_ERROR_FILE"),
              variable((restart + 1) % 3, "TORCHELASTIC_ERROR_FILE"));
  }
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, UsedUpRestartsEndWithTheLastExitCode) {
  EXPECT_EQ(run_tool(2, {"fail_until", "9", "3"}, {"--max-restarts", "1", "--log-dir", folder_.path("logs")}),
            3);
  EXPECT_THAT(errors(), HasSubstr("warning: restart 1 of 1: 2 ranks\n"));
  EXPECT_THAT(errors(), HasSubstr("warning: not restarted: --max-restarts 1 is used up\n"));
  EXPECT_TRUE(folder_.has("logs/rank_00001.log") && folder_.has("logs/attempt_1/rank_00001.log"));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, AMistakeIsNotRestarted) {
  EXPECT_EQ(run_tool(2, {"mistake", "no such key"}, {"--max-restarts", "3"}), 1);
  EXPECT_THAT(errors(), HasSubstr("not restarted: the same error would occur again\n"));
  EXPECT_THAT(errors(), Not(HasSubstr("restart 1")));
}

TEST_F(LaunchTest, ASignalOrTheTimeLimitIsNotRestarted) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const Folder folder;
    Tool tool(folder, launch_args(folder, 2, {"hang"}, {"--max-restarts", "3"}));
    ASSERT_TRUE(folder.wait_for("ready", 2));
    tool.signal(signal);
    EXPECT_EQ(tool.wait(), 128 + signal);
    EXPECT_THAT(folder.read("tool.err"), Not(HasSubstr("restart")));
  }
  EXPECT_EQ(run_tool(2, {"hang"}, {"--max-restarts", "3", "--timeout", "0.3"}), 124);
  EXPECT_THAT(errors(), Not(HasSubstr("restart")));
}

// The ranks that ignore SIGTERM are being ended after a failure when Ctrl-C comes.
TEST_F(LaunchTest, CtrlCAfterAFailureIsNotRestarted) {
  Tool tool(folder_, launch_args(folder_, 2, {"hang", "stubborn"}, {"--max-restarts", "3"}));
  ASSERT_TRUE(folder_.wait_for("ready", 2));
  ::kill(std::stoi(folder_.read("pid_1")), SIGKILL);
  ::usleep(500'000);
  tool.signal(SIGINT);
  EXPECT_EQ(tool.wait(), kKilled);
  EXPECT_THAT(errors(), Not(HasSubstr("restart")));
  EXPECT_TRUE(nothing_runs());
}

TEST_F(LaunchTest, TheTimeLimitIsThatOfAllAttempts) {
  EXPECT_EQ(run_tool(2, {"fail_slowly", "400"}, {"--max-restarts", "100", "--timeout", "1.5"}), 124);
  EXPECT_THAT(errors(), HasSubstr("restart 1 of 100: 2 ranks\n"));
}

TEST_F(LaunchTest, FlagsOfRestartsAreChecked) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--nnodes", "3:2"}, "--nnodes 3:2: expected MIN:MAX with 1 <= MIN <= MAX"},
      {{"--nnodes", "0:2"}, "--nnodes 0:2: expected MIN:MAX with 1 <= MIN <= MAX"},
      {{"--nnodes", "1:x"}, "--nnodes 1:x: expected 1 to 4096 hosts"},
      {{"--nproc", "1:2"}, "--nproc 1:2: expected 1 to 4096 ranks"},
      {{"--nnodes", "1:2"}, "--nnodes MIN:MAX: expected --hostfile FILE, the hosts"},
      {{"--max-restarts", "-1"}, "--max-restarts -1: expected 0 or more"},
      {{"--max-restarts", "many"}, "--max-restarts many: expected 0 to 1000000 restarts"},
      {{"--max-restarts", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"},
       "--max-restarts: the launchers of hosts that were started one by one do not know of each other"},
      {{"--hostfile", "hosts", "--nnodes", "1:2", "--launcher", "pdsh"}, "expected --launcher ssh"},
  };
  std::ofstream(folder_.path("hosts")) << "a slots=2\nb slots=2\n";
  for (auto [flags, error] : cases) {
    for (std::string& flag : flags)
      if (flag == "hosts") flag = folder_.path("hosts");
    std::vector<std::string> args = {"launch"};
    args.insert(args.end(), flags.begin(), flags.end());
    args.insert(args.end(), {"--", "true"});
    Tool tool(folder_, args);
    EXPECT_EQ(tool.wait(), 1);
    EXPECT_THAT(errors(), HasSubstr(error));
  }
}

}  // namespace
}  // namespace tessera::launcher
