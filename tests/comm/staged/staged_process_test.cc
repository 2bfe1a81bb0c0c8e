// Ranks as processes whose devices are host memory, on one host and on two.
#include <gtest/gtest.h>

#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

std::vector<std::string> outputs_of(int world, const testing::Variables& variables) {
  const testing::Processes processes = testing::start("bits", world, variables);
  std::vector<std::string> outputs;
  for (const auto& process : processes) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    outputs.push_back(process->output());
  }
  return outputs;
}

/// Staged ranks get the bits that ranks over `host` get. `hosts`: TEST_HOSTS, or empty: one host.
void expect_the_bits_of(const std::string& host, const std::string& hosts,
                        const std::string& name = "staged") {
  const int world = hosts.empty() ? 3 : static_cast<int>(hosts.size());
  testing::Variables on_host{{"TEST_BACKEND", host}}, staged{{"TEST_BACKEND", name}};
  if (!hosts.empty()) on_host["TEST_HOSTS"] = staged["TEST_HOSTS"] = hosts;
  const std::vector<std::string> expected = outputs_of(world, on_host), found = outputs_of(world, staged);
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const std::string& line = expected[rank];
    EXPECT_EQ(line.compare(0, 5, "bits "), 0) << line;
    EXPECT_EQ(found[rank], str(line.substr(0, line.find(" backend")), " backend staged\n"));
  }
}

TEST(StagedProcesses, OnOneHostGiveTheBitsOfSharedMemory) { expect_the_bits_of("shm", ""); }

TEST(StagedProcesses, OnSeveralHostsGiveTheBitsOfHybrid) { expect_the_bits_of("hybrid", "aabb"); }

TEST(StagedProcesses, WithAHostEachGiveTheBitsOfGloo) { expect_the_bits_of("gloo", "abc"); }

TEST(StagedProcesses, HaveAnOldName) { expect_the_bits_of("shm", "", "p2p"); }

TEST(StagedProcesses, RankZeroSaysWhatCarriesThemAndWhatTheOldNameMeans) {
  for (const std::string name : {"staged", "p2p"}) {
    const testing::Processes processes =
        testing::start("sum", 2, {{"TEST_BACKEND", name}, {"TEST_LOG", "1"}});
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      EXPECT_EQ(processes[rank]->wait(), 0);
      const std::string& output = processes[rank]->output();
      const auto says = [&](const char* text) { return output.find(text) != std::string::npos; };
      EXPECT_EQ(says("backend staged: tensors pass through the host's memory, over shm"), rank == 0)
          << output;
      EXPECT_EQ(says("comm.backend \"p2p\" is now \"staged\": tensors of a CUDA device pass through the "
                     "host's memory"),
                rank == 0 && name == "p2p")
          << output;
    }
  }
}

}  // namespace
}  // namespace tessera::comm
