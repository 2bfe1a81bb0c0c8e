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
using testing::seconds_since;
using testing::start;
using testing::Variables;
using Clock = std::chrono::steady_clock;

TEST(ProcessTest, RanksMeetAndAddUpWithNothingElseOnTheTerminal) {
  for (const auto& process : start("sum", 3, {{"MASTER_ADDR", "localhost"}})) {
    EXPECT_EQ(process->wait(), 0);
    EXPECT_EQ(process->output(), "sum 3 backend shm\n");
  }
}

TEST(ProcessTest, RankZeroMayComeLast) {
  const int port = free_port();
  RankProcess one({"sum"}, rank_variables(1, 2, port));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  RankProcess zero({"sum"}, rank_variables(0, 2, port));
  EXPECT_EQ(one.wait(), 0);
  EXPECT_EQ(one.output(), "sum 2 backend shm\n");
  EXPECT_EQ(zero.wait(), 0);
}

TEST(ProcessTest, AnAddressOfTheNetworkWorksToo) {
  char name[256] = {};
  ASSERT_EQ(gethostname(name, sizeof name - 1), 0);
  for (const auto& process : start("sum", 2, {{"MASTER_ADDR", name}})) {
    EXPECT_EQ(process->wait(), 0);
    EXPECT_EQ(process->output(), "sum 2 backend shm\n");
  }
}

TEST(ProcessTest, GloosInterfaceCanBeChosen) {
  for (const auto& process : start("sum", 2, {{"TEST_BACKEND", "gloo"}, {"GLOO_SOCKET_IFNAME", "lo"}})) {
    EXPECT_EQ(process->wait(), 0) << process->output();
  }
  for (const auto& process :
       start("sum", 2,
             {{"TEST_BACKEND", "gloo"}, {"GLOO_SOCKET_IFNAME", "no-such-if"}, {"TEST_TIMEOUT_MS", "1000"}})) {
    EXPECT_EQ(process->wait(), 3);
    EXPECT_EQ(process->output(),
              "error: GLOO_SOCKET_IFNAME=no-such-if: this host has no network interface 'no-such-if'\n");
  }
}

TEST(ProcessTest, RankZeroServesOnASocketOfTheLaunchers) {
  const int port = free_port();
  const int fd = listen_for_store("127.0.0.1", port);
  Variables first = rank_variables(0, 2, port);
  first["TESSERA_STORE_FD"] = std::to_string(fd);
  RankProcess zero({"sum"}, first, fd);
  RankProcess one({"sum"}, rank_variables(1, 2, port));
  ::close(fd);
  EXPECT_EQ(zero.wait(), 0) << zero.output();
  EXPECT_EQ(one.wait(), 0) << one.output();
  Variables wrong = rank_variables(0, 2, free_port());
  wrong.emplace("TESSERA_STORE_FD", "1");
  RankProcess misled({"sum"}, wrong);
  EXPECT_EQ(misled.wait(), 3);
  EXPECT_EQ(misled.output(), "error: TESSERA_STORE_FD=1 is not a listening socket\n");
}

TEST(ProcessTest, TorchrunsAgentServesTheStoreAcrossRestarts) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  for (const char* restart : {"0", "1"}) {
    for (const auto& process : start("sum", 2,
                                     {{"MASTER_PORT", std::to_string(agent->getPort())},
                                      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                      {"TORCHELASTIC_RESTART_COUNT", restart}})) {
      EXPECT_EQ(process->wait(), 0);
      EXPECT_EQ(process->output(), "sum 2 backend shm\n");
    }
  }
}

TEST(ProcessTest, APortInUseIsOneLine) {
  const int port = free_port();
  const int fd = listen_for_store("127.0.0.1", port);
  RankProcess zero({"sum"}, rank_variables(0, 2, port));
  EXPECT_EQ(zero.wait(), 3);
  EXPECT_EQ(zero.output(),
            str("error: the port of 127.0.0.1:", port,
                " is in use: rank 0 cannot serve the rendezvous there; set MASTER_PORT to a free port\n"));
  ::close(fd);
}

TEST(ProcessTest, NobodyServing) {
  Variables variables = rank_variables(1, 2, free_port());
  variables.emplace("TEST_RENDEZVOUS_MS", "500");
  RankProcess one({"sum"}, variables);
  EXPECT_EQ(one.wait(), 3);
  EXPECT_EQ(one.output().find("error: nobody serves the rendezvous at 127.0.0.1:"), 0u) << one.output();
}

TEST(ProcessTest, AnUnknownMasterAddress) {
  Variables variables = rank_variables(1, 2, free_port());
  variables.insert_or_assign("MASTER_ADDR", std::string("no such host"));
  RankProcess one({"sum"}, variables);
  EXPECT_EQ(one.wait(), 3);
  EXPECT_EQ(one.output().find("error: MASTER_ADDR=no such host is no known host name or address"), 0u)
      << one.output();
}

TEST(ProcessTest, MissingRanksAreNamedAtTheRendezvous) {
  const int port = free_port();
  Processes processes;
  for (const int rank : {0, 2}) {
    Variables variables = rank_variables(rank, 5, port);
    variables.emplace("TEST_RENDEZVOUS_MS", "1000");
    processes.push_back(std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, variables));
  }
  for (const auto& process : processes) {
    EXPECT_EQ(process->wait(), 3);
    EXPECT_EQ(process->output(),
              "error: ranks 1, 3 and 4 of 5 have not arrived at the rendezvous within 1 s\n");
  }
}

TEST(ProcessTest, DifferentWorldSizes) {
  const int port = free_port();
  const auto begin = Clock::now();
  RankProcess zero({"sum"}, rank_variables(0, 2, port));
  RankProcess one({"sum"}, rank_variables(1, 3, port));
  for (RankProcess* process : {&zero, &one}) {
    EXPECT_EQ(process->wait(), 3);
    EXPECT_EQ(process->output().find("error: WORLD_SIZE differs between ranks: it is "), 0u)
        << process->output();
    EXPECT_NE(process->output().find("3 on rank 1"), std::string::npos) << process->output();
    EXPECT_NE(process->output().find("2 on rank 0"), std::string::npos) << process->output();
  }
  EXPECT_LT(seconds_since(begin), 10);
}

TEST(ProcessTest, OneRankGivenToTwoProcesses) {
  const int port = free_port();
  Processes processes;
  for (const int rank : {0, 1, 1}) {
    processes.push_back(
        std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, rank_variables(rank, 3, port)));
  }
  for (const auto& process : processes) {
    EXPECT_EQ(process->wait(), 3);
    EXPECT_EQ(process->output().find("error: RANK=1 is given to two processes: process "), 0u)
        << process->output();
  }
}

TEST(ProcessTest, RankZeroWaitsForThoseWhoStillReadItsStore) {
  for (int round = 0; round < 2; ++round) {
    for (const auto& process : start("exchange", 2)) {
      EXPECT_EQ(process->wait(), 0);
      EXPECT_EQ(process->output(), "exchanged\n");
    }
  }
}

TEST(ProcessTest, SettingsThatMustBeEqualAreComparedAtTheRendezvous) {
  const std::vector<std::pair<Variables, std::string>> cases{
      {{{"TEST_BACKEND", "gloo"}},
       "error: comm.backend differs between ranks: it is \"auto\" on rank 0 and \"gloo\" on rank 2\n"},
      {{{"TEST_TIMEOUT_MS", "2500"}},
       "error: comm.timeout_s differs between ranks: it is 60 on rank 0 and 2.5 on rank 2\n"}};
  for (const auto& [odd, expected] : cases) {
    const int port = free_port();
    Processes processes;
    for (int rank = 0; rank < 3; ++rank) {
      Variables variables = rank_variables(rank, 3, port);
      if (rank == 2) variables.insert(odd.begin(), odd.end());
      processes.push_back(std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, variables));
    }
    for (const auto& process : processes) {
      EXPECT_EQ(process->wait(), 3);
      EXPECT_EQ(process->output(), expected);
    }
  }
}

TEST(ProcessTest, ARankOfAnotherReleaseIsRefused) {
  const int port = free_port();
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    Variables variables = rank_variables(rank, 2, port);
    if (rank == 1) variables["TEST_VERSION"] = "4000";
    processes.push_back(std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, variables));
  }
  const std::regex expected(
      "error: the version of what ranks say to each other differs between ranks: it is [0-9]+ on rank 0 and "
      "4000 on rank 1\n");
  for (const auto& process : processes) {
    EXPECT_EQ(process->wait(), 3);
    EXPECT_TRUE(std::regex_match(process->output(), expected)) << process->output();
  }
}

TEST(ProcessTest, RanksWithoutTheRunsSecretDoNotJoin) {
  const std::string secret = "00112233445566778899aabbccddeeff";
  for (const auto& process : start("sum", 2, {{"TESSERA_RUN_SECRET", secret}})) EXPECT_EQ(process->wait(), 0);
  const std::string differs = "error: TESSERA_RUN_SECRET differs on rank 1 from rank 0";
  const std::string unset = "error: TESSERA_RUN_SECRET is not set on rank 1, but is on rank 0";
  const std::string expected = "; expected the same value on all ranks\n";
  for (const auto& [theirs, error] : {std::pair{secret + "0", differs}, {std::string(), unset}}) {
    const int port = free_port();
    Variables first = rank_variables(0, 2, port), second = rank_variables(1, 2, port);
    first["TESSERA_RUN_SECRET"] = secret;
    first["TEST_RENDEZVOUS_MS"] = "3000";
    if (!theirs.empty()) second["TESSERA_RUN_SECRET"] = theirs;
    RankProcess zero({"sum"}, first);
    std::this_thread::sleep_for(std::chrono::seconds(1));  // rank 0 comes first
    RankProcess one({"sum"}, second);
    EXPECT_EQ(one.wait(), 3);
    EXPECT_EQ(one.output(), error + expected);
    EXPECT_EQ(zero.wait(), 3);
    EXPECT_EQ(zero.output(), "error: rank 1 of 2 has not arrived at the rendezvous within 3 s\n");
  }
}

/// Nor can they read or forge what ranks say.
TEST(ProcessTest, AStrangerAtTheRendezvousReadsNothing) {
  const int port = free_port();
  const Variables secret = {{"TESSERA_RUN_SECRET", "00112233445566778899aabbccddeeff"}};
  Variables variables = rank_variables(0, 2, port);
  variables.insert(secret.begin(), secret.end());
  RankProcess zero({"sum"}, variables);
  await_server("127.0.0.1", port, std::chrono::seconds(20), [](const std::string&) {});
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  const auto stranger = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<std::string> keys;
  while (keys.size() < 3) keys = stranger->listKeys();  // the fingerprint, the world's size, rank 0
  for (const std::string& key : keys) {
    EXPECT_EQ(key.find("rank"), std::string::npos) << key;
    const std::vector<uint8_t> value = stranger->get(key);
    EXPECT_EQ(std::string(value.begin(), value.end()).find("process"), std::string::npos) << key;
  }
  variables = rank_variables(1, 2, port);
  variables.insert(secret.begin(), secret.end());
  RankProcess one({"sum"}, variables);
  EXPECT_EQ(one.wait(), 0) << one.output();
  EXPECT_EQ(zero.wait(), 0) << zero.output();
}

/// Which secret counts is decided by rank 0, and not by whoever comes first.
TEST(ProcessTest, StraysThatComeFirstDoNotStopTheRun) {
  const std::string secret = "00112233445566778899aabbccddeeff";
  for (int round = 0; round < 3; ++round) {
    const int port = free_port();
    Processes strays;
    for (const char* theirs : {"", "another secret"}) {
      Variables variables = rank_variables(1, 2, port);
      if (*theirs != '\0') variables["TESSERA_RUN_SECRET"] = theirs;
      strays.push_back(std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, variables));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // they wait for a server
    Processes run;
    for (const int rank : {0, 1}) {
      Variables variables = rank_variables(rank, 2, port);
      variables["TESSERA_RUN_SECRET"] = secret;
      run.push_back(std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, variables));
    }
    for (const auto& process : run) {
      EXPECT_EQ(process->wait(), 0) << process->output();
      EXPECT_EQ(process->output(), "sum 2 backend shm\n");
    }
    for (const auto& process : strays) EXPECT_EQ(process->wait(), 3) << process->output();
  }
}

/// What the ranks of a run wrote, written again by a stranger before the ranks of a later run with the same
/// secret come: under the same names, and in every order of the two.
TEST(ProcessTest, WhatWasRecordedOfAnEarlierRunDoesNotCount) {
  const std::string secret = "00112233445566778899aabbccddeeff";
  std::map<std::string, std::vector<uint8_t>> recorded;
  for (int round = 0; round < 3; ++round) {
    const int port = free_port();
    const auto start_rank = [&](int rank) {
      Variables variables = rank_variables(rank, 3, port);
      variables["TESSERA_RUN_SECRET"] = secret;
      return std::make_unique<RankProcess>(std::vector<std::string>{"sum"}, variables);
    };
    Processes run;
    run.push_back(start_rank(0));
    await_server("127.0.0.1", port, std::chrono::seconds(20), [](const std::string&) {});
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.waitWorkers = false;
    const auto stranger = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const auto replay = [&] {
      for (const auto& [key, value] : recorded) stranger->set(key, value);
    };
    if (round != 2) replay();
    run.push_back(start_rank(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(700));  // both are there
    if (round == 0)
      for (const std::string& key : stranger->listKeys()) recorded[key] = stranger->get(key);
    if (round == 2) replay();
    run.push_back(start_rank(2));
    for (const auto& process : run) {
      EXPECT_EQ(process->wait(), 0) << process->output();
      EXPECT_EQ(process->output(), "sum 3 backend shm\n");
    }
  }
  EXPECT_GE(recorded.size(), 5U);
}

TEST(ProcessTest, AServerThatIsNotTheRendezvous) {
  const int port = free_port();
  const FileDescriptor listener(listen_for_store("127.0.0.1", port));
  Variables variables = rank_variables(1, 2, port);
  variables.emplace("TEST_RENDEZVOUS_MS", "1500");
  auto begin = Clock::now();
  RankProcess waiting({"sum"}, variables);  // nothing accepts or answers
  EXPECT_EQ(waiting.wait(), 3);
  EXPECT_NE(waiting.output().find("something accepts connections, but does not answer; waited 1.5 s"),
            std::string::npos)
      << waiting.output();
  EXPECT_LT(seconds_since(begin), 6);

  begin = Clock::now();
  RankProcess answered({"sum"}, rank_variables(1, 2, port));
  std::thread server([&] {
    ::close(::accept(listener.get(), nullptr, nullptr));  // of the first
    const FileDescriptor connection(::accept(listener.get(), nullptr, nullptr));
    EXPECT_EQ(::write(connection.get(), "HTTP/1.1 400 Bad Request\r\n\r\n", 28), 28);
    EXPECT_EQ(answered.wait(), 3);
  });
  server.join();
  EXPECT_NE(answered.output().find("is not the rendezvous: another program has that port"), std::string::npos)
      << answered.output();
  EXPECT_LT(seconds_since(begin), 10);
}

TEST(ProcessTest, ALongWaitAtTheRendezvousSaysForWhat) {
  Variables without_server = rank_variables(1, 2, free_port()),
            without_others = rank_variables(0, 3, free_port());
  for (Variables* variables : {&without_server, &without_others})
    variables->insert({{"TEST_LOG", "1"}, {"TEST_RENDEZVOUS_MS", "7000"}});
  RankProcess one({"sum"}, without_server), zero({"sum"}, without_others);
  EXPECT_TRUE(one.await_output(str("rank 1 waits for rank 0 to serve the rendezvous at 127.0.0.1:",
                                   without_server["MASTER_PORT"], " (Connection refused); gives up in 2 s")))
      << one.output();
  EXPECT_TRUE(
      zero.await_output(str("rank 0 waits at the rendezvous at 127.0.0.1:", without_others["MASTER_PORT"],
                            " for ranks 1 and 2 of 3; gives up in 2 s")))
      << zero.output();
  EXPECT_EQ(one.wait(), 3);
  EXPECT_EQ(zero.wait(), 3);
}

TEST(ProcessTest, TheLaunchersLimitOfTheRendezvousCounts) {
  Variables variables = rank_variables(1, 2, free_port());
  variables.emplace("TESSERA_RENDEZVOUS_TIMEOUT_S", "0.5");
  const auto begin = Clock::now();
  RankProcess one({"sum"}, variables);
  EXPECT_EQ(one.wait(), 3);
  EXPECT_NE(one.output().find("waited 0.5 s"), std::string::npos) << one.output();
  EXPECT_LT(seconds_since(begin), 5);
}

TEST(ProcessTest, TooFewFilesThatMayBeOpenAreAnErrorAtOnce) {
  const auto begin = Clock::now();
  for (const std::string limit : {"12", "16", "24"}) {
    for (const auto& process : start("sum", 2, {{"TEST_NOFILE", limit}})) {
      EXPECT_EQ(process->wait(), 3);
      EXPECT_NE(process->output().find(
                    str("may have no more than ", limit, " files open, and a group of 2 ranks needs about ")),
                std::string::npos)
          << process->output();
    }
  }
  EXPECT_LT(seconds_since(begin), 10);
}

TEST(ProcessTest, ALoopbackInterfaceThatIsDownIsAnErrorAtOnce) {
  const auto begin = Clock::now();
  for (const int rank : {0, 1}) {
    Variables variables = rank_variables(rank, 2, free_port());
    variables.emplace("TEST_NO_LOOPBACK", "1");
    RankProcess process({"sum"}, variables);
    const int code = process.wait();
    if (code == 77) GTEST_SKIP() << "no network namespace can be made here";
    EXPECT_EQ(code, 3);
    EXPECT_NE(process.output().find("loopback interface"), std::string::npos) << process.output();
  }
  EXPECT_LT(seconds_since(begin), 5);
}

}  // namespace
}  // namespace tessera::comm
