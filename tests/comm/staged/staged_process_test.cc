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

/// The bits that ranks over the transport of their hosts get.
TEST(StagedProcesses, GiveTheBitsOfWhatCarriesThem) {
  const std::tuple<const char*, int, const char*> cases[] = {
      {"shm", 3, "aaa"}, {"hybrid", 4, "aabb"}, {"gloo", 3, "abc"}};
  for (const auto& [carrier, world, hosts] : cases) {
    const std::vector<std::string> expected =
        outputs_of(world, {{"TEST_BACKEND", carrier}, {"TEST_HOSTS", hosts}});
    const std::vector<std::string> found =
        outputs_of(world, {{"TEST_BACKEND", "staged"}, {"TEST_HOSTS", hosts}});
    for (size_t rank = 0; rank < expected.size(); ++rank) {
      const std::string& line = expected[rank];
      EXPECT_EQ(line.compare(0, 5, "bits "), 0) << line;
      EXPECT_EQ(found[rank], str(line.substr(0, line.find(" backend")), " backend staged\n"));
    }
  }
}

TEST(StagedProcesses, RankZeroSaysWhatCarriesThem) {
  const testing::Processes processes =
      testing::start("sum", 2, {{"TEST_BACKEND", "staged"}, {"TEST_LOG", "1"}});
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    EXPECT_EQ(processes[rank]->wait(), 0);
    const std::string& output = processes[rank]->output();
    const auto says = [&](const char* text) { return output.find(text) != std::string::npos; };
    EXPECT_TRUE(says("sum 2 backend staged\n")) << output;
    EXPECT_EQ(says("backend staged: tensors pass through the host's memory, over shm"), rank == 0) << output;
  }
}

}  // namespace
}  // namespace tessera::comm
