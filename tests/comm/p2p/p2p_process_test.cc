// Ranks as processes that map each other's memory, over host memory.
#include <gtest/gtest.h>

#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::Processes;
using testing::start;

std::vector<std::string> outputs_of(int world, const testing::Variables& variables, int exit_code = 0) {
  const Processes processes = start("bits", world, variables);
  std::vector<std::string> outputs;
  for (const auto& process : processes) {
    EXPECT_EQ(process->wait(), exit_code) << process->output();
    outputs.push_back(process->output());
  }
  return outputs;
}

TEST(P2pProcesses, GiveTheBitsOfSharedMemory) {
  for (const int world : {2, 3}) {
    std::vector<std::string> expected = outputs_of(world, {{"TEST_BACKEND", "shm"}});
    const std::vector<std::string> found = outputs_of(world, {{"TEST_BACKEND", "p2p"}});
    for (int rank = 0; rank < world; ++rank) {
      std::string& line = expected[static_cast<size_t>(rank)];
      EXPECT_EQ(line.compare(0, 5, "bits "), 0) << line;
      EXPECT_EQ(found[static_cast<size_t>(rank)],
                str(line.substr(0, line.find(" backend")), " backend p2p\n"));
    }
  }
}

TEST(P2pProcesses, OnSeveralHostsSayWhyTheyCannot) {
  for (const std::string& output : outputs_of(2, {{"TEST_BACKEND", "p2p"}, {"TEST_HOSTS", "ab"}}, 3))
    EXPECT_EQ(output,
              "error: backend \"p2p\" cannot be used: the ranks are on several hosts, or in several network "
              "namespaces\n");
}

}  // namespace
}  // namespace tessera::comm
