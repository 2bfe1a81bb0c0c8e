// Ranks as processes: one is killed, stopped or fails, and the others end with an error that names it.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <thread>

#include "core/str.h"
#include "launcher/launch.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::free_port;
using testing::Processes;
using testing::rank_variables;
using testing::RankProcess;
using testing::seconds_since;
using testing::start;
using testing::Variables;
using Clock = std::chrono::steady_clock;

class OnEachBackend : public testing::EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backends, OnEachBackend, ::testing::Values("shm", "gloo", "hybrid", "staged"),
                         testing::backend_name);

/// Ranks 0 and 1 on one host, rank 2 on another.
Variables on(const std::string& backend) {
  Variables variables{{"TEST_BACKEND", backend}};
  if (backend == "hybrid") variables["TEST_HOSTS"] = "aab";
  return variables;
}

TEST_P(OnEachBackend, AKilledRankIsNamedWithinSeconds) {
  Processes processes = start("loop", 3, on(GetParam()));
  for (const auto& process : processes) ASSERT_TRUE(process->await_output("running")) << process->output();
  const auto begin = Clock::now();
  processes[1]->kill(SIGKILL);
  EXPECT_EQ(processes[1]->wait(), 128 + SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(processes[rank]->wait(), 3);
    EXPECT_NE(processes[rank]->output().find(": rank 1 is gone (connection closed)\n"), std::string::npos)
        << processes[rank]->output();
  }
  EXPECT_LT(seconds_since(begin), 5);
}

/// A message that has arrived in part waits in Gloo until comm.timeout_s: it must not hold up the rank.
TEST(ProcessTest, ARankKilledInTheMiddleOfALargeMessageHoldsNobodyUp) {
  for (const char* backend : {"gloo", "gloo", "gloo", "hybrid"}) {
    Variables variables = on(backend);
    variables["TEST_NUMEL"] = std::to_string(16 << 20);
    variables["TEST_TIMEOUT_MS"] = "600000";
    Processes processes = start("loop", 3, variables);
    for (const auto& process : processes) ASSERT_TRUE(process->await_output("running")) << process->output();
    const auto begin = Clock::now();
    processes[2]->kill(SIGKILL);
    for (const int rank : {0, 1}) {
      EXPECT_EQ(processes[rank]->wait(), 3);
      EXPECT_NE(processes[rank]->output().find("rank 2 is gone"), std::string::npos)
          << processes[rank]->output();
    }
    EXPECT_LT(seconds_since(begin), 15) << backend;
  }
}

TEST_P(OnEachBackend, RankZeroKilledTakesTheStoreWithIt) {
  Processes processes = start("loop", 3, on(GetParam()));
  for (const auto& process : processes) ASSERT_TRUE(process->await_output("running")) << process->output();
  const auto begin = Clock::now();
  processes[0]->kill(SIGKILL);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(processes[rank]->wait(), 3);
    EXPECT_NE(processes[rank]->output().find("error: rank 0 is gone: its store at 127.0.0.1:"),
              std::string::npos)
        << processes[rank]->output();
  }
  EXPECT_LT(seconds_since(begin), 5);
}

// Its process still exists, so no connection closes: comm.timeout_s ends the waits.
TEST_P(OnEachBackend, AStoppedRankIsWaitedForUntilTheTimeout) {
  Variables variables = on(GetParam());
  variables["TEST_TIMEOUT_MS"] = "2000";
  Processes processes = start("loop", 3, variables);
  for (const auto& process : processes) ASSERT_TRUE(process->await_output("running")) << process->output();
  const auto begin = Clock::now();
  processes[1]->kill(SIGSTOP);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(processes[rank]->wait(), 3);
    EXPECT_NE(processes[rank]->output().find("rank 1 has not arrived within 2 s"), std::string::npos)
        << processes[rank]->output();
  }
  EXPECT_GT(seconds_since(begin), 1.5);
  EXPECT_LT(seconds_since(begin), 10) << "the rendezvous has 30 s";
  processes[1]->kill(SIGKILL);
}

/// It serves the store.
TEST_P(OnEachBackend, ARankZeroThatIsStoppedIsNotWaitedForAnyLonger) {
  Variables variables = on(GetParam());
  variables["TEST_TIMEOUT_MS"] = "2000";
  Processes processes = start("loop", 3, variables);
  for (const auto& process : processes) ASSERT_TRUE(process->await_output("running")) << process->output();
  const auto begin = Clock::now();
  processes[0]->kill(SIGSTOP);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(processes[rank]->wait(), 3);
    EXPECT_NE(processes[rank]->output().find("rank 0 "), std::string::npos) << processes[rank]->output();
  }
  EXPECT_GT(seconds_since(begin), 1.5);
  EXPECT_LT(seconds_since(begin), 15) << "the rendezvous has 30 s";
  processes[0]->kill(SIGKILL);
}

TEST_P(OnEachBackend, AnErrorOfOneRankEndsTheOthers) {
  const auto begin = Clock::now();
  Variables variables = on(GetParam());
  variables["TEST_KIND"] = "1";
  const Processes processes = start("fail", 3, variables);
  EXPECT_EQ(processes[1]->wait(), 3);
  EXPECT_EQ(processes[1]->output(), "its own\nerror: data/train: truncated\n");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(processes[rank]->wait(), 3);
    EXPECT_TRUE(
        std::regex_search(processes[rank]->output(),
                          std::regex("of a peer\nerror: .*rank 1 left the group: data/train: truncated")))
        << processes[rank]->output();
  }
  EXPECT_LT(seconds_since(begin), 10);
}

TEST_P(OnEachBackend, TheStoreStaysUntilAllAreDone) {
  const Processes processes = start("rank_0_is_done_first", 3, on(GetParam()));
  for (const auto& process : processes) EXPECT_EQ(process->wait(), 0) << process->output();
}

/// [Note: the last to end] in comm/init/group_context.h
TEST(ProcessTest, RankZeroWaitsForTheOthersAtItsEndAndNotBefore) {
  const std::string file = str(std::filesystem::temp_directory_path().string(), "/left_", ::getpid());
  for (const auto& [pause_ms, signal] : {std::pair(0, 0), {7000, 0}, {60'000, SIGINT}, {60'000, SIGTERM}}) {
    const Processes processes =
        start("needs_rank_0_to_leave", 2,
              {{"TEST_FILE", file}, {"TEST_PAUSE_MS", std::to_string(pause_ms)}, {"TEST_LOG", "1"}});
    ASSERT_TRUE(processes[0]->await_output("left")) << processes[0]->output();
    if (signal != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      processes[0]->kill(signal);
    }
    EXPECT_EQ(processes[0]->wait(), signal != 0 ? 128 + signal : 0) << processes[0]->output();
    if (signal != 0) processes[1]->kill(SIGKILL);
    EXPECT_EQ(processes[1]->wait(), signal != 0 ? 128 + SIGKILL : 0) << processes[1]->output();
    const std::string said = "rank 0 of 2 is done and waits until rank 1 has left the group";
    EXPECT_EQ(processes[0]->output().find(said) != std::string::npos, pause_ms == 7000);
    std::filesystem::remove(file);
  }
}

// The table in docs/communication.md, row by row: ranks started by hand. One is killed while the other
// waits; rank 0 takes the store with it.
class KilledRank : public ::testing::TestWithParam<std::tuple<std::string, int>> {};
INSTANTIATE_TEST_SUITE_P(Waits, KilledRank,
                         ::testing::Values(std::tuple("shm", 0), std::tuple("shm", 1), std::tuple("gloo", 0),
                                           std::tuple("gloo", 1), std::tuple("hybrid", 0),
                                           std::tuple("hybrid", 1), std::tuple("hybrid", 2),
                                           std::tuple("staged", 0), std::tuple("staged", 1)),
                         [](const auto& info) {
                           return str(std::get<0>(info.param), "_rank_", std::get<1>(info.param));
                         });

TEST_P(KilledRank, EndsEveryWait) {
  const auto& [backend, victim] = GetParam();
  const int world = backend == "hybrid" ? 3 : 2;
  std::vector<std::pair<std::string, Processes>> groups;
  for (const char* what : {"connecting", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier",
                           "exchange", "duplicate"}) {
    Variables variables = on(backend);
    variables["TEST_VICTIM"] = std::to_string(victim);
    variables["TEST_KIND"] = "1";
    groups.emplace_back(what, start("wait", world, variables, what));
  }
  for (const auto& [what, processes] : groups)
    EXPECT_EQ(processes[victim]->wait(), 128 + SIGKILL) << what << processes[victim]->output();
  const auto begin = Clock::now();
  for (const auto& [what, processes] : groups)
    for (int rank = 0; rank < world; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(processes[rank]->wait(), 3) << what;
      EXPECT_NE(processes[rank]->output().find("of a peer\n"), std::string::npos)
          << what << processes[rank]->output();
      // A rank that has ended because of the victim may be named too; while ranks connect in place of it, if
      // rank 0 was the first to end, and its store with it.
      const auto names = [&, &output = processes[rank]->output()](int gone) {
        return std::regex_search(
            output, std::regex(str("ranks? ([0-9, and]* )?", gone, "[0-9, and]* (is|are) gone")));
      };
      const bool follows_rank_0 = what == "connecting" && rank > 0 && victim > 0 && names(0);
      EXPECT_TRUE(names(victim) || follows_rank_0) << what << processes[rank]->output();
    }
  EXPECT_LT(seconds_since(begin), 10);
}

TEST_P(OnEachBackend, AKilledRankEndsWaitsUnderTheLauncherToo) {
  ::setenv("TEST_BACKEND", GetParam().c_str(), 1);
  ::setenv("TEST_VICTIM", "1", 1);
  if (GetParam() == "hybrid") ::setenv("TEST_HOSTS", "aab", 1);
  for (const char* what : {"all_reduce", "exchange"}) {
    launcher::Options options;
    options.nproc = 3;
    options.program =
        (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "comm_test_rank").string();
    options.args = {"wait", what};
    const auto begin = Clock::now();
    EXPECT_EQ(launcher::run(options, Logger()), 128 + SIGKILL);
    EXPECT_LT(seconds_since(begin), 15);
  }
  ::unsetenv("TEST_BACKEND");
  ::unsetenv("TEST_VICTIM");
  ::unsetenv("TEST_HOSTS");
}

TEST(ProcessTest, AKilledRankEndsTheWaitForSharedMemory) {
  using Case = std::pair<std::string, std::string>;  // backend, call
  for (const auto& [backend, what] : {Case("shm", "allocate_symmetric"), Case("shm", "allocate_shared")}) {
    const Processes processes = start("wait", 2, {{"TEST_BACKEND", backend}, {"TEST_VICTIM", "0"}}, what);
    EXPECT_EQ(processes[0]->wait(), 128 + SIGKILL);
    const auto begin = Clock::now();
    EXPECT_EQ(processes[1]->wait(), 3);
    EXPECT_NE(processes[1]->output().find("rank 0 is gone"), std::string::npos) << processes[1]->output();
    EXPECT_LT(seconds_since(begin), 5);
  }
}

TEST(ProcessTest, ARankKilledAtTheRendezvousEndsItWhenTheOthersHaveCome) {
  const int port = free_port();
  Variables first = rank_variables(0, 3, port), second = rank_variables(1, 3, port),
            third = rank_variables(2, 3, port);
  second.emplace("TEST_VICTIM", "1");
  RankProcess zero({"wait", "rendezvous"}, first), one({"wait", "rendezvous"}, second);
  EXPECT_EQ(one.wait(), 128 + SIGKILL);
  const auto begin = Clock::now();
  RankProcess two({"wait", "rendezvous"}, third);
  for (RankProcess* process : {&zero, &two}) {
    EXPECT_EQ(process->wait(), 3);
    // The other one may have ended because of it.
    EXPECT_TRUE(
        std::regex_search(process->output(), std::regex("rank 1 is gone|ranks (0 and 1|1 and 2) are gone")))
        << process->output();
  }
  EXPECT_LT(seconds_since(begin), 5);
}

TEST(ProcessTest, RankZeroKilledAtTheRendezvousEndsIt) {
  const int port = free_port();
  Variables first = rank_variables(0, 3, port);
  first.emplace("TEST_VICTIM", "0");
  RankProcess one({"wait", "rendezvous"}, rank_variables(1, 3, port));
  std::this_thread::sleep_for(
      std::chrono::seconds(1));  // it asks for rank 0's server: that lives for a moment
  RankProcess zero({"wait", "rendezvous"}, first);
  EXPECT_EQ(zero.wait(), 128 + SIGKILL);
  const auto begin = Clock::now();
  EXPECT_EQ(one.wait(), 3);
  EXPECT_NE(one.output().find("rank 0 is gone: its store at"), std::string::npos) << one.output();
  EXPECT_LT(seconds_since(begin), 5);
}

TEST(ProcessTest, TheFarewellDoesNotWaitForAKilledRank) {
  const Processes processes = start("wait", 3, {{"TEST_VICTIM", "1"}}, "farewell");
  EXPECT_EQ(processes[1]->wait(), 128 + SIGKILL);
  const auto begin = Clock::now();
  EXPECT_EQ(processes[0]->wait(), 0) << processes[0]->output();
  EXPECT_LT(seconds_since(begin), 2);
}

}  // namespace
}  // namespace tessera::comm
