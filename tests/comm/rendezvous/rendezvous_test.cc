// Ranks as processes: how they find each other, and the errors of those that do not.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <map>
#include <memory>
#include <regex>
#include <thread>

#include "comm/rendezvous/network.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::free_port;
using testing::Processes;
using testing::rank_variables;
using testing::RankProcess;
using testing::Variables;

const std::string kSecret = "00112233445566778899aabbccddeeff";

/// Rank `rank` of a group at a port.
std::unique_ptr<RankProcess> rank_at(int port, int rank, int world, const Variables& extra = {},
                                     const std::string& scenario = "sum") {
  Variables variables = rank_variables(rank, world, port);
  for (const auto& [name, value] : extra) variables[name] = value;
  return std::make_unique<RankProcess>(std::vector<std::string>{scenario}, variables);
}

/// Ranks, their variables and what each one prints.
struct Group {
  std::string name;
  int world;
  std::vector<std::pair<int, Variables>> ranks;
  std::string said;  // a regular expression of the whole output
  int code = 3;
  std::string scenario = "sum";
  std::string port = "";  // empty: a free one
};

/// A group whose ranks all have the same variables.
Group all_with(const std::string& name, int world, const Variables& variables, const std::string& said,
               int code = 3, const std::string& scenario = "sum") {
  Group group{name, world, {}, said, code, scenario};
  for (int rank = 0; rank < world; ++rank) group.ranks.emplace_back(rank, variables);
  return group;
}

/// All groups at once.
void expect_outputs(const std::vector<Group>& groups) {
  std::vector<Processes> started;
  for (const Group& group : groups) {
    const int port = group.port.empty() ? free_port() : std::stoi(group.port);
    for (Processes& processes = started.emplace_back(); const auto& [rank, variables] : group.ranks)
      processes.push_back(rank_at(port, rank, group.world, variables, group.scenario));
  }
  for (size_t i = 0; i < groups.size(); ++i)
    for (const auto& process : started[i]) {
      SCOPED_TRACE(groups[i].name);
      EXPECT_EQ(process->wait(), groups[i].code) << process->output();
      EXPECT_TRUE(std::regex_match(process->output(), std::regex(groups[i].said)))
          << process->output() << "\nshould be " << groups[i].said;
    }
}

TEST(ProcessTest, RanksMeetAndAddUpWithNothingElseOnTheTerminal) {
  char name[256] = {};
  ASSERT_EQ(gethostname(name, sizeof name - 1), 0);
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);  // torchrun's
  const std::string met = "sum 2 backend shm\n";
  expect_outputs({all_with("localhost", 3, {{"MASTER_ADDR", "localhost"}}, "sum 3 backend shm\n", 0),
                  all_with("an address of the network", 2, {{"MASTER_ADDR", name}}, met, 0),
                  all_with("Gloo's interface", 2, {{"TEST_BACKEND", "gloo"}, {"GLOO_SOCKET_IFNAME", "lo"}},
                           "sum 2 backend gloo\n", 0),
                  all_with("a low soft limit of files", 2, {{"TEST_SOFT_NOFILE", "24"}}, met, 0),
                  all_with("with a secret", 2, {{"TESSERA_RUN_SECRET", kSecret}}, met, 0),
                  all_with("the last read of rank 0's store", 2, {}, "exchanged\n", 0, "exchange")});
  for (const char* restart : {"0", "1"})
    expect_outputs({all_with("restart " + std::string(restart), 2,
                             {{"MASTER_PORT", std::to_string(agent->getPort())},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"TORCHELASTIC_RESTART_COUNT", restart}},
                             met, 0)});
}

TEST(ProcessTest, RankZeroMayComeLast) {
  const int port = free_port();
  const auto one = rank_at(port, 1, 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  const auto zero = rank_at(port, 0, 2);
  EXPECT_EQ(one->wait(), 0);
  EXPECT_EQ(one->output(), "sum 2 backend shm\n");
  EXPECT_EQ(zero->wait(), 0);
}

TEST(ProcessTest, RanksThatCannotMeetSayWhy) {
  const int in_use = free_port();
  const FileDescriptor listener(listen_for_store("127.0.0.1", in_use));
  std::vector<Group> groups{
      {"a port in use",
       2,
       {{0, {}}},
       str("error: the port of 127.0.0.1:", in_use,
           " is in use: rank 0 cannot serve the rendezvous there; set MASTER_PORT to a free port\n"),
       3,
       "sum",
       std::to_string(in_use)},
      {"no such host",
       2,
       {{1, {{"MASTER_ADDR", "no such host"}}}},
       "error: MASTER_ADDR=no such host is no known host name or address.*\n"},
      all_with("no such interface", 2, {{"TEST_BACKEND", "gloo"}, {"GLOO_SOCKET_IFNAME", "no-such-if"}},
               "error: GLOO_SOCKET_IFNAME=no-such-if: this host has no network interface 'no-such-if'\n"),
      {"worlds",
       2,
       {{0, {}}, {1, {{"WORLD_SIZE", "3"}}}},
       "error: WORLD_SIZE differs between ranks: it is (2 on rank 0 and 3 on rank 1|3 on rank 1 and 2 on "
       "rank "
       "0)\n"},
      {"one rank twice",
       3,
       {{0, {}}, {1, {}}, {1, {}}},
       "error: RANK=1 is given to two processes: process .*\n"},
      {"backends",
       3,
       {{0, {}}, {1, {}}, {2, {{"TEST_BACKEND", "gloo"}}}},
       "error: comm.backend differs between ranks: it is \"auto\" on rank 0 and \"gloo\" on rank 2\n"},
      {"time limits",
       3,
       {{0, {}}, {1, {}}, {2, {{"TEST_TIMEOUT_MS", "2500"}}}},
       "error: comm.timeout_s differs between ranks: it is 60 on rank 0 and 2.5 on rank 2\n"},
      {"releases",
       2,
       {{0, {}}, {1, {{"TEST_VERSION", "4000"}}}},
       "error: the version of what ranks say to each other differs between ranks: it is [0-9]+ on rank 0 and "
       "4000 on rank 1\n"}};
  for (const std::string limit : {"12", "16", "24"})
    groups.push_back(all_with(
        "files " + limit, 2, {{"TEST_NOFILE", limit}},
        str(".*may have no more than ", limit, " files open, and a group of 2 ranks needs about (.|\n)*")));
  expect_outputs(groups);
}

/// Time limits of the rendezvous, which are long enough for ranks that come.
TEST(ProcessTest, RanksThatWaitInVainSayForWhat) {
  const Variables limit{{"TEST_RENDEZVOUS_MS", "7000"}},
      log{{"TEST_LOG", "1"}, {"TEST_RENDEZVOUS_MS", "7000"}};
  const int silent = free_port();
  const FileDescriptor listener(listen_for_store("127.0.0.1", silent));  // nothing accepts or answers
  expect_outputs(
      {{"nobody",
        2,
        {{1, {{"TEST_RENDEZVOUS_MS", "500"}}}},
        "error: nobody serves the rendezvous at 127.0.0.1:.*\n"},
       {"the launcher's limit", 2, {{1, {{"TESSERA_RENDEZVOUS_TIMEOUT_S", "0.5"}}}}, ".*waited 0.5 s.*\n"},
       {"no answer",
        2,
        {{1, {{"TEST_RENDEZVOUS_MS", "1500"}}}},
        ".*something accepts connections, but does not answer; waited 1.5 s(.|\n)*",
        3,
        "sum",
        std::to_string(silent)},
       {"others",
        5,
        {{0, limit}, {2, limit}},
        "error: ranks 1, 3 and 4 of 5 have not arrived at the rendezvous within 7 s\n"},
       {"a message before the end, without a server",
        2,
        {{1, log}},
        "(.|\n)*rank 1 waits for rank 0 to serve the rendezvous at 127.0.0.1:[0-9]+ \\(Connection "
        "refused\\); "
        "gives up in [12] s(.|\n)*"},
       {"a message before the end, without others",
        3,
        {{0, log}},
        "(.|\n)*rank 0 waits at the rendezvous at 127.0.0.1:[0-9]+ for ranks 1 and 2 of 3; gives up in [12] "
        "s(.|\n)*"}});
}

TEST(ProcessTest, AServerThatIsNotTheRendezvous) {
  const int port = free_port();
  const FileDescriptor listener(listen_for_store("127.0.0.1", port));
  const auto one = rank_at(port, 1, 2);
  const FileDescriptor connection(::accept(listener.get(), nullptr, nullptr));
  EXPECT_EQ(::write(connection.get(), "HTTP/1.1 400 Bad Request\r\n\r\n", 28), 28);
  EXPECT_EQ(one->wait(), 3);
  EXPECT_NE(one->output().find("is not the rendezvous: another program has that port"), std::string::npos)
      << one->output();
}

TEST(ProcessTest, RanksWithoutTheRunsSecretDoNotJoin) {
  const std::string differs = "error: TESSERA_RUN_SECRET differs on rank 1 from rank 0";
  const std::string unset = "error: TESSERA_RUN_SECRET is not set on rank 1, but is on rank 0";
  const std::string set = "error: TESSERA_RUN_SECRET is set on rank 1, but not on rank 0";
  const Variables first{{"TESSERA_RUN_SECRET", kSecret}}, second{{"TESSERA_RUN_SECRET", kSecret + "0"}};
  struct Case {
    Variables zeros, theirs;
    std::string error;
  };
  for (Case one : {Case{first, second, differs}, {first, {}, unset}, {{}, second, set}}) {
    const int port = free_port();
    // Rank 1's own end, after which rank 0 would wait for an hour.
    one.zeros["TEST_RENDEZVOUS_MS"] = one.theirs["TEST_RENDEZVOUS_MS"] = "3600000";
    const auto zero = rank_at(port, 0, 2, one.zeros);
    await_server("127.0.0.1", port, std::chrono::seconds(60), [](const std::string&) {});
    const auto other = rank_at(port, 1, 2, one.theirs);
    EXPECT_EQ(other->wait(), 3);
    EXPECT_EQ(other->output(), one.error + "; expected the same value on all ranks\n");
  }
}

/// A client of the rendezvous' store that has no secret.
c10::intrusive_ptr<c10d::TCPStore> stranger_at(int port) {
  await_server("127.0.0.1", port, std::chrono::seconds(60), [](const std::string&) {});
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// Nor can they read or forge what ranks say.
TEST(ProcessTest, AStrangerAtTheRendezvousReadsNothing) {
  const int port = free_port();
  const Variables secret{{"TESSERA_RUN_SECRET", kSecret}};
  const auto zero = rank_at(port, 0, 2, secret);
  const auto stranger = stranger_at(port);
  std::vector<std::string> keys;
  for (size_t before = 0; keys.size() < 3 || keys.size() > before;) {  // until rank 0 waits for rank 1
    before = keys.size();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    keys = stranger->listKeys();
  }
  for (const std::string& key : keys) {
    EXPECT_EQ(key.find("rank"), std::string::npos) << key;
    const std::vector<uint8_t> value = stranger->get(key);
    EXPECT_EQ(std::string(value.begin(), value.end()).find("process"), std::string::npos) << key;
  }
  const auto one = rank_at(port, 1, 2, secret);
  EXPECT_EQ(one->wait(), 0) << one->output();
  EXPECT_EQ(zero->wait(), 0) << zero->output();
}

/// Nor does the unsealed fingerprint of rank 0's secret decide anything, which everybody can overwrite.
TEST(ProcessTest, AStrangersFingerprintDecidesNothing) {
  const int port = free_port();
  const Variables secret{{"TESSERA_RUN_SECRET", kSecret}};
  Processes run;
  run.push_back(rank_at(port, 0, 3, secret));
  const auto stranger = stranger_at(port);
  std::jthread again([&](const std::stop_token& stop) {
    for (int round = 0; !stop.stop_requested(); ++round) try {
        const std::string text = round % 2 == 0 ? "none" : "0123456789abcdef";
        round % 5 == 0 ? void(stranger->deleteKey("tessera/secret"))
                       : stranger->set("tessera/secret", std::vector<uint8_t>(text.begin(), text.end()));
      } catch (const std::exception&) {  // rank 0 is done
        return;
      }
  });
  for (const int rank : {1, 2}) run.push_back(rank_at(port, rank, 3, secret));
  for (const auto& process : run) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    EXPECT_EQ(process->output(), "sum 3 backend shm\n");
  }
}

/// A stranger who removes what ranks have written can end a run, and no more: no rank waits without end.
TEST(ProcessTest, WhatAStrangerRemovesIsNamed) {
  const int port = free_port();
  const Variables variables{{"TESSERA_RUN_SECRET", kSecret}, {"TEST_RENDEZVOUS_MS", "3600000"}};
  const auto zero = rank_at(port, 0, 3, variables), one = rank_at(port, 1, 3, variables);
  const auto stranger = stranger_at(port);
  std::vector<std::string> keys;
  for (size_t before = 0; keys.size() < 8 || keys.size() > before;) {  // until both wait for rank 2
    before = keys.size();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    keys = stranger->listKeys();
  }
  // Again and again: it does not matter how far the two have come.
  std::jthread remover([&](const std::stop_token& stop) {
    try {
      for (; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(300)))
        for (const std::string& key : stranger->listKeys()) stranger->deleteKey(key);
    } catch (const std::exception&) {  // rank 0 has ended
    }
  });
  for (RankProcess* process : {zero.get(), one.get()}) {
    EXPECT_EQ(process->wait(), 3);
    EXPECT_NE(process->output().find("error: the rendezvous no longer has "), std::string::npos)
        << process->output();
  }
}

/// Which secret counts is decided by rank 0, and not by whoever comes first.
TEST(ProcessTest, StraysThatComeFirstDoNotStopTheRun) {
  const int port = free_port();
  const Variables soon{{"TEST_RENDEZVOUS_MS", "8000"}},  // one that has not met rank 0 waits for so long
      another{{"TESSERA_RUN_SECRET", "another secret, as long as the other"}, {"TEST_RENDEZVOUS_MS", "8000"}};
  const auto unset = rank_at(port, 1, 2, soon), other = rank_at(port, 1, 2, another);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // they wait for a server
  const Variables secret{{"TESSERA_RUN_SECRET", kSecret}};
  expect_outputs(
      {{"the run", 2, {{0, secret}, {1, secret}}, "sum 2 backend shm\n", 0, "sum", std::to_string(port)}});
  for (RankProcess* stray : {unset.get(), other.get()}) EXPECT_EQ(stray->wait(), 3) << stray->output();
}

/// What the ranks of a run wrote, written again by a stranger before the ranks of a later run with the same
/// secret come: under the same names, and in every order of the two.
TEST(ProcessTest, WhatWasRecordedOfAnEarlierRunDoesNotCount) {
  const Variables secret{{"TESSERA_RUN_SECRET", kSecret}};
  std::map<std::string, std::vector<uint8_t>> recorded;
  for (int round = 0; round < 3; ++round) {
    const int port = free_port();
    Processes run;
    run.push_back(rank_at(port, 0, 3, secret));
    const auto stranger = stranger_at(port);
    const auto replay = [&] {
      for (const auto& [key, value] : recorded) stranger->set(key, value);
    };
    if (round != 2) replay();
    run.push_back(rank_at(port, 1, 3, secret));
    std::this_thread::sleep_for(std::chrono::milliseconds(700));  // both are there
    if (round == 0)
      for (const std::string& key : stranger->listKeys()) recorded[key] = stranger->get(key);
    if (round == 2) replay();
    run.push_back(rank_at(port, 2, 3, secret));
    for (const auto& process : run) {
      EXPECT_EQ(process->wait(), 0) << process->output();
      EXPECT_EQ(process->output(), "sum 3 backend shm\n");
    }
  }
  EXPECT_GE(recorded.size(), 5U);
}

TEST(ProcessTest, ALoopbackInterfaceThatIsDownIsAnErrorAtOnce) {
  for (const int rank : {0, 1}) {
    const auto process =
        rank_at(free_port(), rank, 2, {{"TEST_NO_LOOPBACK", "1"}, {"TEST_RENDEZVOUS_MS", "3600000"}});
    const int code = process->wait();
    if (code == 77) GTEST_SKIP() << "no network namespace can be made here";
    EXPECT_EQ(code, 3);
    EXPECT_NE(process->output().find("loopback interface"), std::string::npos) << process->output();
  }
}

}  // namespace
}  // namespace tessera::comm
