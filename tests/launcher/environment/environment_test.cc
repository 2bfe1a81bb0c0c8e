#include "launcher/environment/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "core/environment/environment.h"
#include "core/error.h"
#include "launcher/environment/host.h"
#include "tests/support/errors.h"

namespace tessera::launcher {
namespace {

using tessera::testing::error_of;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                             "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", "PET_NNODES",
                             "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT",
                             "TESSERA_MEMORY_DIR", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"})
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

TEST_F(EnvironmentTest, AnEmptyVariableSaysNothing) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PET_NNODES", "OMP_NUM_THREADS"})
    ::setenv(name, "", 1);
  EXPECT_TRUE(should_start_ranks(2));
  EXPECT_EQ(place_of_this_host(), std::nullopt);
  const std::vector<std::string> environment =
      rank_environment({.local_world_size = 1, .given = {"OMP_NUM_THREADS="}});
  EXPECT_THAT(environment, Contains(StartsWith("OMP_NUM_THREADS=")).Times(1));
  EXPECT_THAT(environment, Not(Contains("OMP_NUM_THREADS=")));
}

TEST_F(EnvironmentTest, InAGroupItIsOneRankAndAnotherNprocIsAnError) {
  ::setenv("RANK", "5", 1);
  EXPECT_FALSE(in_group());  // incomplete variables: environment() reports what is missing
  EXPECT_FALSE(should_start_ranks(std::nullopt));
  ::setenv("WORLD_SIZE", "8", 1);
  ::setenv("MASTER_ADDR", "h", 1);
  ::setenv("MASTER_PORT", "1", 1);
  EXPECT_TRUE(in_group());
  EXPECT_FALSE(should_start_ranks(std::nullopt));
  EXPECT_FALSE(should_start_ranks(8));
  EXPECT_THAT(refusal(2), HasSubstr("already is rank 5 of a group with WORLD_SIZE=8 (torchrun)"));
  ::setenv("LOCAL_WORLD_SIZE", "4", 1);  // two hosts
  ::setenv("LOCAL_RANK", "1", 1);
  EXPECT_FALSE(should_start_ranks(4));
  EXPECT_THAT(refusal(8), HasSubstr("LOCAL_WORLD_SIZE=4"));
}

TEST_F(EnvironmentTest, OneProcessOfMpirunAHostStartsRanks) {
  for (const auto& [name, value] :
       {std::pair("RANK", "1"), {"SIZE", "3"}, {"LOCAL_RANK", "0"}, {"LOCAL_SIZE", "1"}})
    ::setenv(("OMPI_COMM_WORLD_" + std::string(name)).c_str(), value, 1);
  ::setenv("MASTER_ADDR", "first", 1);
  ::setenv("MASTER_PORT", "77", 1);
  const auto place = place_of_this_host();
  ASSERT_TRUE(place);
  EXPECT_EQ(place->node_rank, 1);
  EXPECT_EQ(place->num_nodes, 3);
  EXPECT_EQ(place->master_addr, "first");
  EXPECT_EQ(place->master_port, 77);
  EXPECT_TRUE(should_start_ranks(2));
  EXPECT_FALSE(should_start_ranks(std::nullopt)) << "a rank";
  EXPECT_FALSE(should_start_ranks(1));
  ::setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  EXPECT_FALSE(place_of_this_host());
  EXPECT_THAT(refusal(3), HasSubstr("already is rank 1 of a group with LOCAL_WORLD_SIZE=2 (Open MPI)"));
}

TEST_F(EnvironmentTest, APodOfPyTorchJobGivesTorchrunsFlags) {
  for (const auto& [name, value] : {std::pair("PET_NNODES", "2"),
                                    {"PET_NODE_RANK", "1"},
                                    {"PET_NPROC_PER_NODE", "4"},
                                    {"PET_MASTER_ADDR", "job-master-0"},
                                    {"PET_MASTER_PORT", "23456"},
                                    {"RANK", "1"},
                                    {"WORLD_SIZE", "8"},
                                    {"MASTER_ADDR", "job-master-0"},
                                    {"MASTER_PORT", "23456"}})
    ::setenv(name, value, 1);
  const auto place = place_of_this_host();
  ASSERT_TRUE(place);
  EXPECT_EQ(place->node_rank, 1);
  EXPECT_EQ(place->num_nodes, 2);
  EXPECT_EQ(place->nproc, 4);
  EXPECT_EQ(place->master_addr, "job-master-0");
  EXPECT_EQ(place->master_port, 23456);
  ::unsetenv("PET_MASTER_ADDR");
  ::setenv("MASTER_ADDR", "another", 1);
  EXPECT_EQ(place_of_this_host()->master_addr, "another");
  EXPECT_TRUE(should_start_ranks(std::nullopt));
  for (const char* word : {"auto", "npu"}) {
    ::setenv("PET_NPROC_PER_NODE", word, 1);
    EXPECT_FALSE(should_start_ranks(std::nullopt)) << "one rank a pod";
  }
  ::setenv("PET_NNODES", "1:4", 1);
  EXPECT_FALSE(should_start_ranks(std::nullopt)) << "a rank of an elastic job starts none";
  ::setenv("PET_NNODES", "2:2", 1);
  EXPECT_EQ(place_of_this_host()->num_nodes, 2);
  const auto place_error = [] { return error_of<CommError>([] { place_of_this_host(); }); };
  ::setenv("PET_NPROC_PER_NODE", "4x", 1);
  EXPECT_EQ(place_error(), "PET_NPROC_PER_NODE=4x: expected a number");
  ::unsetenv("PET_NODE_RANK");
  EXPECT_THAT(place_error(), HasSubstr("PET_NODE_RANK is not set although PET_NNODES=2 is"));
}

TEST_F(EnvironmentTest, RanksGetTorchrunsVariablesOnceEach) {
  ::setenv("RANK", "99", 1);
  ::setenv("LOCAL_RANK", "9", 1);
  ::setenv("TESSERA_MEMORY_DIR", "/of/the/outer/run", 1);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  ::setenv("PET_NNODES", "2", 1);
  RankVariables variables{
      .rank = 2, .world_size = 5, .local_rank = 0, .local_world_size = 3, .node_rank = 1, .num_nodes = 2};
  variables.master_addr = "10.0.0.1";
  variables.master_port = 1234;
  variables.run_id = "id";
  variables.restart_count = 1;
  variables.max_restarts = 3;
  variables.error_file = "/some/file";
  variables.visible_devices = "0,2";
  variables.given = {"A=b=c", "RANK=7", "OMP_NUM_THREADS=3"};
  const auto environment = rank_environment(variables);
  for (const char* line :
       {"RANK=2", "WORLD_SIZE=5", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=1", "GROUP_WORLD_SIZE=2",
        "MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234", "TESSERA_RUN_ID=id", "TESSERA_ERROR_FILE=/some/file",
        "TORCHELASTIC_ERROR_FILE=/some/file", "TORCHELASTIC_RESTART_COUNT=1", "TORCHELASTIC_MAX_RESTARTS=3",
        "CUDA_VISIBLE_DEVICES=0,2", "A=b=c", "OMP_NUM_THREADS=3"})
    EXPECT_THAT(environment, Contains(line).Times(1));
  EXPECT_THAT(environment, Contains(StartsWith("RANK=")).Times(1));
  EXPECT_THAT(environment, Contains(StartsWith("TORCHELASTIC_")).Times(3));
  EXPECT_THAT(environment, Not(Contains(StartsWith("PET_"))));
  EXPECT_THAT(environment, Not(Contains(StartsWith("TESSERA_MEMORY_DIR="))));
  EXPECT_THAT(environment, Contains(StartsWith("PATH=")));
}

TEST_F(EnvironmentTest, ThreadsAreCoresSharedByRanksUnlessSet) {
  const int cores = available_cores();
  const auto of = [](int ranks) {
    return rank_environment({.world_size = ranks, .local_world_size = ranks});
  };
  EXPECT_GE(cores, 1);
  EXPECT_THAT(of(1), Contains("OMP_NUM_THREADS=" + std::to_string(cores)));
  EXPECT_THAT(of(4096), Contains("OMP_NUM_THREADS=1"));
  ::setenv("OMP_NUM_THREADS", "7", 1);
  EXPECT_THAT(of(4096), Contains("OMP_NUM_THREADS=7"));
  EXPECT_THAT(rank_environment({.local_world_size = 4096, .given = {"OMP_NUM_THREADS="}}),
              Contains("OMP_NUM_THREADS=1"))
      << "unset by --env-file";
}

}  // namespace
}  // namespace tessera::launcher
