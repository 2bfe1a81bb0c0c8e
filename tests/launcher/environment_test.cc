#include "launcher/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/environment.h"
#include "core/error.h"
#include "launcher/host.h"

namespace tessera::launcher {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE"})
      ::unsetenv(name);
  }
  static std::string refusal(int nproc) {
    try {
      should_start_ranks(nproc);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(EnvironmentTest, OutsideAGroupItStartsRanksIfMoreThanOneIsAskedFor) {
  EXPECT_FALSE(in_group());
  EXPECT_FALSE(should_start_ranks(std::nullopt));
  EXPECT_FALSE(should_start_ranks(1));
  EXPECT_TRUE(should_start_ranks(2));
  EXPECT_TRUE(should_start_ranks(kMaxRanks));
  EXPECT_THAT(refusal(0), HasSubstr("--nproc 0: expected 1 to 4096"));
  EXPECT_THAT(refusal(-2), HasSubstr("--nproc -2"));
  EXPECT_THAT(refusal(4097), HasSubstr("--nproc 4097"));
}

TEST_F(EnvironmentTest, InAGroupItIsOneRankAndAnotherNprocIsAnError) {
  ::setenv("RANK", "5", 1);
  EXPECT_FALSE(in_group());  // incomplete variables: the rendezvous reports what is missing
  ::setenv("WORLD_SIZE", "8", 1);
  EXPECT_TRUE(in_group());
  EXPECT_FALSE(should_start_ranks(std::nullopt));
  EXPECT_FALSE(should_start_ranks(8));
  EXPECT_THAT(refusal(2), HasSubstr("already is rank 5 of a group with WORLD_SIZE=8"));
  ::setenv("LOCAL_WORLD_SIZE", "4", 1);  // two hosts
  EXPECT_FALSE(should_start_ranks(4));
  EXPECT_THAT(refusal(8), HasSubstr("LOCAL_WORLD_SIZE=4"));
  ::setenv("LOCAL_WORLD_SIZE", "4x", 1);
  EXPECT_THAT(refusal(4), HasSubstr("LOCAL_WORLD_SIZE=4x"));
}

TEST_F(EnvironmentTest, RanksGetTorchrunsVariablesOnceEach) {
  ::setenv("RANK", "99", 1);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  const auto environment = rank_environment({2, 3, "127.0.0.1", 1234, "id", "/some/file"});
  for (const char* line :
       {"RANK=2", "WORLD_SIZE=3", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=0", "GROUP_WORLD_SIZE=1",
        "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1234", "TESSERA_RUN_ID=id", "TESSERA_ERROR_FILE=/some/file"})
    EXPECT_THAT(environment, Contains(line).Times(1));
  EXPECT_THAT(environment, Contains(StartsWith("RANK=")).Times(1));
  EXPECT_THAT(environment, Not(Contains(StartsWith("TORCHELASTIC_"))));
  EXPECT_THAT(environment, Contains(StartsWith("PATH=")));
}

TEST_F(EnvironmentTest, ThreadsAreCoresSharedByRanksUnlessSet) {
  const int cores = available_cores();
  EXPECT_GE(cores, 1);
  EXPECT_THAT(rank_environment({0, 1, "", 1, "", ""}), Contains("OMP_NUM_THREADS=" + std::to_string(cores)));
  EXPECT_THAT(rank_environment({0, 4096, "", 1, "", ""}), Contains("OMP_NUM_THREADS=1"));
  ::setenv("OMP_NUM_THREADS", "7", 1);
  EXPECT_THAT(rank_environment({0, 4096, "", 1, "", ""}), Contains("OMP_NUM_THREADS=7"));
}

}  // namespace
}  // namespace tessera::launcher
