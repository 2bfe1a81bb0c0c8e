// Which cores ranks get, on made-up machines written as /sys has them.
#include "launcher/environment/core_binding.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "core/error.h"
#include "tests/launcher/tool.h"
#include "tests/support/errors.h"

namespace tessera::launcher {
namespace {

using testing::Folder;

class CoreBindingTest : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const auto full = std::filesystem::path(folder_.path()) / "sys/devices/system" / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text << '\n';
  }
  /// Two sockets of four cores with two threads each, numbered as Linux does: threads 0-7 are the cores'
  /// first.
  void two_sockets() {
    write("node/online", "0-1");
    write("node/node0/cpulist", "0-3,8-11");
    write("node/node1/cpulist", "4-7,12-15");
    for (int cpu = 0; cpu < 16; ++cpu)
      write("cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
            std::to_string(cpu % 8) + "," + std::to_string(cpu % 8 + 8));
  }
  static std::vector<int> first(int count) {
    std::vector<int> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }
  Folder folder_;
};

using Shares = std::vector<std::vector<Core>>;

TEST_F(CoreBindingTest, RanksStayWithinANode) {
  two_sockets();
  const NumaNodes nodes = numa_nodes(first(16), folder_.path());
  EXPECT_EQ(nodes, (NumaNodes{{{0, 8}, {1, 9}, {2, 10}, {3, 11}}, {{4, 12}, {5, 13}, {6, 14}, {7, 15}}}));
  EXPECT_EQ(share_cores(nodes, 1)[0].size(), 8U);
  EXPECT_EQ(share_cores(nodes, 2), (Shares{nodes[0], nodes[1]}));
  // Three ranks: one has a node to itself, no rank spans both.
  EXPECT_EQ(share_cores(nodes, 3), (Shares{nodes[0], {{4, 12}, {5, 13}}, {{6, 14}, {7, 15}}}));
  EXPECT_EQ(share_cores(nodes, 4)[2], (std::vector<Core>{{4, 12}, {5, 13}}));
  EXPECT_EQ(share_cores(nodes, 16)[9], (std::vector<Core>{{12}})) << "hardware threads";
  EXPECT_EQ(
      tessera::testing::error_of<ConfigError>([&] { share_cores(nodes, 17); }),
      "--bind-cores: 9 ranks for 8 hardware threads of one NUMA node; expected at most a rank a thread");
}

TEST_F(CoreBindingTest, EveryCoreGoesToOneRank) {
  two_sockets();
  const NumaNodes nodes = numa_nodes(first(16), folder_.path());
  for (int ranks = 1; ranks <= 16; ++ranks) {
    std::vector<int> seen(16, 0);
    for (const auto& share : share_cores(nodes, ranks)) {
      EXPECT_FALSE(share.empty()) << ranks;
      for (const Core& core : share)
        for (const int thread : core) ++seen[static_cast<size_t>(thread)];
    }
    EXPECT_EQ(seen, std::vector<int>(16, 1)) << ranks << " ranks";
  }
}

TEST_F(CoreBindingTest, OnlyWhatThisProcessMayUse) {
  two_sockets();
  EXPECT_EQ(numa_nodes({1, 9, 5}, folder_.path()), (NumaNodes{{{1, 9}}, {{5}}}));
  EXPECT_EQ(numa_nodes({4, 5, 6}, folder_.path()).size(), 1U);
}

TEST_F(CoreBindingTest, WithoutNumaThereIsOneNode) {
  EXPECT_EQ(numa_nodes(first(2), folder_.path()), (NumaNodes{{{0}, {1}}}));
  EXPECT_EQ(numa_nodes(allowed_threads()).size() >= 1, true);
}

}  // namespace
}  // namespace tessera::launcher
