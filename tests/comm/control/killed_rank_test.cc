// Ranks as processes: one is killed, stopped or fails, and the others end with an error that names it.
#include <gtest/gtest.h>
#include <signal.h>

#include <map>
#include <regex>
#include <thread>

#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::free_port;
using testing::Processes;
using testing::rank_variables;
using testing::RankProcess;
using testing::start;
using testing::Variables;

/// Milliseconds that no test waits: what ends sooner has noticed something else than this limit.
constexpr const char* kForever = "3600000";

void await_output(const Processes& processes, const std::string& text) {
  for (const auto& process : processes) ASSERT_TRUE(process->await_output(text)) << process->output();
}

/// All but the victim end with an error of what this pattern finds.
void expect_errors(const Processes& processes, int victim, const std::string& pattern) {
  for (int rank = 0; rank < static_cast<int>(processes.size()); ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(processes[rank]->wait(), 3) << rank << " of " << victim;
    EXPECT_TRUE(std::regex_search(processes[rank]->output(), std::regex(pattern)))
        << processes[rank]->output() << "\nshould say " << pattern;
  }
}

class OnEachBackend : public testing::EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backends, OnEachBackend, ::testing::Values("shm", "gloo", "hybrid", "staged"),
                         testing::backend_name);

/// Ranks 0 and 1 on one host, rank 2 on another. No time limit counts.
Variables on(const std::string& backend) {
  Variables variables{
      {"TEST_BACKEND", backend}, {"TEST_TIMEOUT_MS", kForever}, {"TEST_RENDEZVOUS_MS", kForever}};
  if (backend == "hybrid") variables["TEST_HOSTS"] = "aab";
  return variables;
}

// Rank 0 serves the store. The process of a stopped rank still exists, so no connection closes:
// comm.timeout_s ends the waits, and not the limit of the rendezvous.
TEST_P(OnEachBackend, ARankThatIsLostIsNamed) {
  struct Loss {
    int victim, signal;
    const char* said;
    Processes processes = {};
  } losses[] = {{1, SIGKILL, ": rank 1 is gone \\(connection closed\\)\n"},
                {0, SIGKILL, "error: rank 0 is gone: its store at 127.0.0.1:"},
                {1, SIGSTOP, "rank 1 has not arrived within 2 s"},
                {0, SIGSTOP, "rank 0 "}};
  for (Loss& loss : losses) {
    Variables variables = on(GetParam());
    if (loss.signal == SIGSTOP) variables["TEST_TIMEOUT_MS"] = "2000";
    loss.processes = start("loop", 3, variables);
    await_output(loss.processes, "running");
    loss.processes[loss.victim]->kill(loss.signal);
    if (loss.signal == SIGKILL) expect_errors(loss.processes, loss.victim, loss.said);
  }
  for (Loss& loss : losses)
    if (loss.signal == SIGSTOP) expect_errors(loss.processes, loss.victim, loss.said);
}

/// The others stand in the driver, where they see nothing; the backend notices nothing by itself.
TEST(ProcessTest, ARankKilledWhileTheOthersWaitForTheDeviceIsNamed) {
  Variables variables = on("shm");
  variables["TEST_KIND"] = "1";
  const Processes processes = start("stream", 3, variables);
  EXPECT_EQ(processes[1]->wait(), 128 + SIGKILL) << processes[1]->output();
  expect_errors(processes, 1, "of a peer\n(.|\n)*ranks? ([0-9, and]* )?1[0-9, and]* (is|are) gone");
}

/// A message that has arrived in part waits in Gloo until comm.timeout_s: it must not hold up the rank.
TEST(ProcessTest, ARankKilledInTheMiddleOfALargeMessageHoldsNobodyUp) {
  for (const char* backend : {"gloo", "gloo", "gloo", "hybrid"}) {
    Variables variables = on(backend);
    variables["TEST_NUMEL"] = std::to_string(16 << 20);
    const Processes processes = start("loop", 3, variables);
    await_output(processes, "running");
    processes[2]->kill(SIGKILL);
    expect_errors(processes, 2, "rank 2 is gone");
  }
}

TEST_P(OnEachBackend, AnErrorOfOneRankEndsTheOthers) {
  Variables variables = on(GetParam());
  variables["TEST_KIND"] = "1";
  const Processes processes = start("fail", 3, variables);
  EXPECT_EQ(processes[1]->wait(), 3);
  EXPECT_EQ(processes[1]->output(), "its own\nerror: data/train: truncated\n");
  expect_errors(processes, 1, "of a peer\nerror: .*rank 1 left the group: data/train: truncated");
}

/// [Note: the last to end] in comm/init/group_context.h
TEST(ProcessTest, RankZeroWaitsForTheOthersAtItsEndAndNotBefore) {
  std::map<std::string, Processes> late;  // rank 0 has served the store for longer than it waits in silence
  for (const char* backend : {"shm", "gloo", "hybrid", "staged"})
    late.emplace(backend, start("rank_0_is_done_first", 3, on(backend)));
  const TemporaryFolder folder("left");
  struct Case {
    int pause_ms, signal;
    Processes processes = {};
  } cases[] = {{0, 0}, {7000, 0}, {60'000, SIGINT}, {60'000, SIGTERM}};
  for (Case& one : cases) {
    const std::string file = (folder.path() / str(one.pause_ms, "_", one.signal)).string();
    one.processes =
        start("needs_rank_0_to_leave", 2,
              {{"TEST_FILE", file}, {"TEST_PAUSE_MS", std::to_string(one.pause_ms)}, {"TEST_LOG", "1"}});
  }
  for (const Case& one : cases) {
    ASSERT_TRUE(one.processes[0]->await_output("left")) << one.processes[0]->output();
    if (one.signal != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it waits by now
      one.processes[0]->kill(one.signal);
    }
  }
  for (const auto& [pause_ms, signal, processes] : cases) {
    EXPECT_EQ(processes[0]->wait(), signal != 0 ? 128 + signal : 0) << processes[0]->output();
    if (signal != 0) processes[1]->kill(SIGKILL);
    EXPECT_EQ(processes[1]->wait(), signal != 0 ? 128 + SIGKILL : 0) << processes[1]->output();
    if (pause_ms == 60'000) continue;
    const std::string said = "rank 0 of 2 is done and waits until rank 1 has left the group";
    EXPECT_EQ(processes[0]->output().find(said) != std::string::npos, pause_ms == 7000);
  }
  for (const auto& [backend, processes] : late)
    for (const auto& process : processes) EXPECT_EQ(process->wait(), 0) << backend << process->output();
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
  std::vector<std::string> calls{"connecting", "all_gather", "reduce_scatter", "all_reduce",
                                 "broadcast",  "barrier",    "exchange",       "duplicate"};
  if (backend == "shm" && victim == 0) calls.insert(calls.end(), {"allocate_symmetric", "allocate_shared"});
  std::map<std::string, Processes> groups;
  for (const std::string& what : calls) {
    Variables variables = on(backend);
    variables["TEST_VICTIM"] = std::to_string(victim);
    variables["TEST_KIND"] = "1";
    groups.emplace(what, start("wait", backend == "hybrid" ? 3 : 2, variables, what));
  }
  for (const auto& [what, processes] : groups) {
    SCOPED_TRACE(what);
    EXPECT_EQ(processes[victim]->wait(), 128 + SIGKILL) << processes[victim]->output();
    // A rank that has ended because of the victim may be named too; while ranks connect in place of it, if
    // rank 0 was the first to end, and its store with it.
    const std::string gone = what == "connecting" && victim > 0 ? str("(", victim, "|0)") : str(victim);
    expect_errors(processes, victim,
                  str("of a peer\n(.|\n)*ranks? ([0-9, and]* )?", gone, "[0-9, and]* (is|are) gone"));
  }
}

TEST(ProcessTest, ARankKilledAtTheRendezvousEndsIt) {
  const int port = free_port();
  const auto rank = [&](int number, int victim) {
    Variables variables = rank_variables(number, 3, port);
    variables["TEST_RENDEZVOUS_MS"] = kForever;
    variables["TEST_VICTIM"] = std::to_string(victim);
    return std::make_unique<RankProcess>(std::vector<std::string>{"wait", "rendezvous"}, variables);
  };
  Processes processes;
  for (const int number : {0, 1}) processes.push_back(rank(number, 1));
  EXPECT_EQ(processes[1]->wait(), 128 + SIGKILL);
  processes.push_back(rank(2, 1));  // once all have come
  // The other one may have ended because of it.
  expect_errors(processes, 1, "rank 1 is gone|ranks (0 and 1|1 and 2) are gone");
}

TEST(ProcessTest, RankZeroKilledAtTheRendezvousEndsIt) {
  const int port = free_port();
  Variables first = rank_variables(0, 3, port), second = rank_variables(1, 3, port);
  first["TEST_VICTIM"] = "0";
  second["TEST_RENDEZVOUS_MS"] = kForever;
  RankProcess one({"wait", "rendezvous"}, second);
  std::this_thread::sleep_for(
      std::chrono::seconds(1));  // it asks for rank 0's server: that lives for a moment
  RankProcess zero({"wait", "rendezvous"}, first);
  EXPECT_EQ(zero.wait(), 128 + SIGKILL);
  EXPECT_EQ(one.wait(), 3);
  EXPECT_NE(one.output().find("rank 0 is gone: its store at"), std::string::npos) << one.output();
}

TEST(ProcessTest, TheFarewellDoesNotWaitForAKilledRank) {
  const Processes processes =
      start("wait", 3, {{"TEST_VICTIM", "1"}, {"TEST_TIMEOUT_MS", kForever}}, "farewell");
  EXPECT_EQ(processes[1]->wait(), 128 + SIGKILL);
  EXPECT_EQ(processes[0]->wait(), 0) << processes[0]->output();
}

}  // namespace
}  // namespace tessera::comm
