// environment() under launchers other than torchrun: the variables are those that the real programs set (Open
// MPI 4.1.4 and Slurm 22.05 as printed by `env` in a rank; Hydra, Horovod and Kubernetes by their sources).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/environment/environment.h"
#include "core/environment/slurm_lists.h"
#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::error_of;
using Variables = std::map<std::string, std::string>;

/// Replaces the environment for its life.
class Surroundings {
 public:
  explicit Surroundings(const Variables& variables) {
    for (char** entry = environ; *entry; ++entry) before_.emplace_back(*entry);
    ::clearenv();
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  Surroundings(const Surroundings&) = delete;
  Surroundings& operator=(const Surroundings&) = delete;
  ~Surroundings() {
    ::clearenv();
    for (const std::string& line : before_)
      ::setenv(line.substr(0, line.find('=')).c_str(), line.substr(line.find('=') + 1).c_str(), 1);
  }

 private:
  std::vector<std::string> before_;
};

Variables operator+(Variables changes, const Variables& base) {
  changes.insert(base.begin(), base.end());  // what is there already stays
  return changes;
}

Variables without(const char* name, Variables variables) {
  variables.erase(name);
  return variables;
}

Environment environment_of(const Variables& variables) {
  const Surroundings surroundings(variables);
  return environment();
}

std::string refusal(const Variables& variables) {
  const Surroundings surroundings(variables);
  return error_of<CommError>([] { environment(); });
}

bool in_group_with(const Variables& variables) {
  const Surroundings surroundings(variables);
  return in_group();
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "473038849"},     {"PMIX_RANK", "1"}};
const Variables kSlurm = {{"SLURM_JOB_ID", "1"},          {"SLURM_JOB_NODELIST", "n[1-2]"},
                          {"SLURM_LOCALID", "0"},         {"SLURM_NODEID", "1"},
                          {"SLURM_NPROCS", "3"},          {"SLURM_NTASKS", "3"},
                          {"SLURM_PROCID", "2"},          {"SLURM_STEPID", "0"},
                          {"SLURM_STEP_ID", "0"},         {"SLURM_STEP_NODELIST", "n[1-2]"},
                          {"SLURM_STEP_NUM_TASKS", "3"},  {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                          {"SLURM_TASKS_PER_NODE", "2,1"}};
const Variables kHydra = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
const Variables kHorovod = {{"HOROVOD_RANK", "3"},       {"HOROVOD_SIZE", "4"},
                            {"HOROVOD_LOCAL_RANK", "1"}, {"HOROVOD_LOCAL_SIZE", "2"},
                            {"HOROVOD_CROSS_RANK", "1"}, {"HOROVOD_CROSS_SIZE", "2"},
                            {"MASTER_ADDR", "h0"}};
const Variables kPod = {{"RANK", "1"},
                        {"WORLD_SIZE", "2"},
                        {"MASTER_ADDR", "job-master-0"},
                        {"MASTER_PORT", "23456"},
                        {"HOSTNAME", "job-worker-0"},
                        {"KUBERNETES_SERVICE_HOST", "10.0.0.1"}};

void expect_place(const Environment& env, int rank, int size, int local_rank, int local_size) {
  EXPECT_EQ(env.rank, rank);
  EXPECT_EQ(env.world_size, size);
  EXPECT_EQ(env.local_rank, local_rank);
  EXPECT_EQ(env.local_world_size, local_size);
}

TEST(EnvironmentSchemes, OpenMpiOnOneHostNeedsNoAddress) {
  const Environment env = environment_of(kOpenMpi);
  expect_place(env, 1, 2, 1, 2);
  EXPECT_EQ(env.launcher, "Open MPI");
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(environment_of(Variables{{"MASTER_ADDR", "h"}, {"MASTER_PORT", "77"}} + kOpenMpi).master_addr,
            "h");
  EXPECT_EQ(environment_of(Variables{{"MASTER_ADDR", "h"}, {"MASTER_PORT", "77"}} + kOpenMpi).master_port,
            77);
}

TEST(EnvironmentSchemes, OnSeveralHostsMpirunHasToBeToldWhereRankZeroIs) {
  const Variables two_hosts =
      Variables{{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}} + kOpenMpi;
  EXPECT_EQ(
      refusal(two_hosts),
      "MASTER_ADDR is not set, and Open MPI does not say where rank 0 is (OMPI_COMM_WORLD_SIZE=2 ranks, 1 on "
      "this host); set MASTER_ADDR to the address of rank 0's host on all ranks (mpirun -x "
      "MASTER_ADDR=HOST)");
  EXPECT_EQ(environment_of(Variables{{"SLURM_JOB_NODELIST", "n[7-8]"}} + two_hosts).master_addr, "n7");
  EXPECT_THAT(
      refusal({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}}),
      ::testing::HasSubstr(
          "Hydra does not say where rank 0 is (PMI_SIZE=2 ranks, 1 on this host); set MASTER_ADDR to "
          "the address of rank 0's host on all ranks (mpirun -genv MASTER_ADDR HOST)"));
}

TEST(EnvironmentSchemes, ThePortIsTheSameForAJobAndDiffersBetweenJobs) {
  std::set<int> ports;
  for (int job = 0; job < 100; ++job) {
    const Variables rank_1 =
        Variables{{"PMIX_NAMESPACE", std::to_string(473038849 + 65536 * job)}} + kOpenMpi;
    const Variables rank_0 =
        Variables{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}} + rank_1;
    const int port = environment_of(rank_1).master_port;
    EXPECT_EQ(environment_of(rank_0).master_port, port);
    EXPECT_GE(port, 15000);
    EXPECT_LT(port, 30000);
    ports.insert(port);
  }
  EXPECT_GE(ports.size(), 95U) << "of 100 jobs";
  EXPECT_NE(environment_of(Variables{{"SLURM_STEP_ID", "1"}} + kSlurm).master_port,
            environment_of(kSlurm).master_port)
      << "two steps of one job";
}

TEST(EnvironmentSchemes, SlurmsMasterIsTheFirstHostOfTheStep) {
  const Environment env = environment_of(kSlurm);
  expect_place(env, 2, 3, 0, 1);
  EXPECT_EQ(env.launcher, "Slurm");
  EXPECT_EQ(env.master_addr, "n1");
  const Variables first =
      Variables{{"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "0"}} + kSlurm;
  expect_place(environment_of(first), 1, 3, 1, 2);
  EXPECT_EQ(environment_of(Variables{{"SLURM_STEP_NODELIST", "m[08-09]"}} + kSlurm).master_addr, "m08");
  EXPECT_EQ(environment_of(Variables{{"MASTER_ADDR", "10.0.0.7"}} + kSlurm).master_addr, "10.0.0.7");
}

TEST(EnvironmentSchemes, SlurmsTasksAHostComeFromWhicheverVariableIsThere) {
  const Variables per_node =
      without("SLURM_STEP_TASKS_PER_NODE",
              without("SLURM_TASKS_PER_NODE", Variables{{"SLURM_NTASKS_PER_NODE", "2"}} + kSlurm));
  expect_place(environment_of(per_node), 2, 3, 0, 2);
  const Variables of_job = Variables{{"SLURM_TASKS_PER_NODE", "2(x3),1"},
                                     {"SLURM_NODEID", "3"},
                                     {"SLURM_PROCID", "6"},
                                     {"SLURM_STEP_NUM_TASKS", "7"}} +
                           without("SLURM_STEP_TASKS_PER_NODE", kSlurm);
  expect_place(environment_of(of_job), 6, 7, 0, 1);
  const Variables at_2 =
      Variables{{"SLURM_NODEID", "2"}, {"SLURM_LOCALID", "1"}, {"SLURM_PROCID", "5"}} + of_job;
  expect_place(environment_of(at_2), 5, 7, 1, 2);
}

TEST(EnvironmentSchemes, ABatchScriptIsNoRank) {
  const Variables batch = without("SLURM_STEP_ID", without("SLURM_STEPID", kSlurm));
  EXPECT_EQ(environment_of(batch).world_size, 1);
  EXPECT_FALSE(in_group_with(batch));
  EXPECT_TRUE(in_group_with(kSlurm));
  EXPECT_FALSE(in_group_with(
      {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_LOCALID", "0"}}))
      << "srun -n 1 is a way to get a host";
}

TEST(EnvironmentSchemes, HydraHorovodAndBarePmi) {
  expect_place(environment_of(kHydra), 1, 4, 1, 4);
  expect_place(environment_of({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}), 2, 4, 2, 4);
  const Environment env = environment_of(kHorovod);
  expect_place(env, 3, 4, 1, 2);
  EXPECT_EQ(env.master_addr, "h0");
}

TEST(EnvironmentSchemes, TheInnerLauncherCounts) {
  const Variables one_daemon_a_host =
      Variables{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}} + kSlurm;
  EXPECT_EQ(environment_of(Variables(kOpenMpi) + one_daemon_a_host).launcher, "Open MPI");
  EXPECT_EQ(environment_of(Variables(kHydra) + one_daemon_a_host).launcher, "Hydra");
  EXPECT_EQ(environment_of(Variables{{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}} + kSlurm).launcher,
            "Slurm");  // --mpi=pmi2
  const Variables torchrun = {
      {"RANK", "5"},        {"WORLD_SIZE", "8"},  {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"},
      {"MASTER_ADDR", "m"}, {"MASTER_PORT", "5"}, {"GROUP_RANK", "1"}};
  EXPECT_EQ(environment_of(Variables(torchrun) + kSlurm).rank, 5) << "srun torchrun";
}

TEST(EnvironmentSchemes, VariablesSetByHandHaveToAgree) {
  expect_place(environment_of(Variables{{"WORLD_SIZE", "3"}} + kSlurm), 2, 3, 0, 1);
  EXPECT_EQ(refusal(Variables{{"WORLD_SIZE", "4"}} + kSlurm),
            "WORLD_SIZE=4, but Slurm says 3 (rank 2 of 3, SLURM_PROCID=2); unset WORLD_SIZE, or start the "
            "ranks without "
            "Slurm");
  EXPECT_EQ(refusal(Variables{{"RANK", "0"}, {"WORLD_SIZE", "2"}} + kOpenMpi),
            "RANK=0, but Open MPI says 1 (rank 1 of 2, OMPI_COMM_WORLD_RANK=1); unset RANK, or start the "
            "ranks without "
            "Open MPI");
}

TEST(EnvironmentSchemes, APodOfPyTorchJobIsOneRankOfItsHost) {
  expect_place(environment_of(kPod), 1, 2, 0, 1);
  expect_place(environment_of(without("KUBERNETES_SERVICE_HOST", kPod)), 1, 2, 1, 2);
  expect_place(environment_of(Variables{{"PET_NPROC_PER_NODE", "auto"}, {"HOSTNAME", "any"}} + kPod), 1, 2, 0,
               1);
  EXPECT_EQ(refusal(Variables{{"PET_NPROC_PER_NODE", "2"}} + kPod),
            "PET_NPROC_PER_NODE=2: PyTorchJob expects 2 ranks in this pod, and this process was not started "
            "as one; start "
            "the program by torchrun or by tessera launch, which read the variables PET_*");
}

TEST(EnvironmentSchemes, HalfSetOrWrongIsOneLine) {
  EXPECT_EQ(refusal(without("OMPI_COMM_WORLD_SIZE", kOpenMpi)),
            "OMPI_COMM_WORLD_SIZE is not set although OMPI_COMM_WORLD_RANK=1 is; start the ranks by mpirun, "
            "or unset the "
            "variables OMPI_COMM_WORLD_*");
  EXPECT_EQ(refusal(Variables{{"OMPI_COMM_WORLD_RANK", "2"}} + kOpenMpi),
            "OMPI_COMM_WORLD_RANK=2 is out of range: expected 0 to 1, because OMPI_COMM_WORLD_SIZE=2");
  EXPECT_EQ(refusal(Variables{{"SLURM_LOCALID", "1"}} + kSlurm),
            "SLURM_LOCALID=1 is out of range: expected 0 to 0, because 1 tasks are on this host");
  EXPECT_EQ(refusal(Variables{{"SLURM_STEP_TASKS_PER_NODE", "2(x"}} + kSlurm),
            "SLURM_STEP_TASKS_PER_NODE: '2(x' is not a list of tasks a host; expected one as in 2(x3),1");
  EXPECT_EQ(refusal(Variables{{"SLURM_NODEID", "2"}} + kSlurm),
            "SLURM_NODEID=2 is out of range: expected 0 to 1, because of SLURM_STEP_TASKS_PER_NODE=2,1");
  EXPECT_EQ(refusal(Variables{{"SLURM_STEP_NODELIST", "n[1-"}} + kSlurm),
            "SLURM_STEP_NODELIST: 'n[1-' is not a list of hosts; expected names as in n[01-03,7],m2");
}

TEST(SlurmLists, TheFirstHostKeepsItsZeros) {
  EXPECT_EQ(first_host("n[01-03,7],m2"), "n01");
  EXPECT_EQ(first_host("n[7,01-03]"), "n7");
  EXPECT_EQ(first_host("a"), "a");
  EXPECT_EQ(first_host("m2,n[01-03]"), "m2");
  EXPECT_EQ(first_host("n[098-101]"), "n098");
  EXPECT_EQ(first_host("r[1-2]n[3,5]x"), "r1n3x");
  for (const char* wrong : {"", ",", ",a", "n[", "n[1-", "n[a]", "n]", "n[1]]", "n[]", "n[-1]"})
    EXPECT_NE(error_of<ConfigError>([&] { first_host(wrong); }), "") << wrong;
}

TEST(SlurmLists, TaskCounts) {
  EXPECT_EQ(expand_task_counts("2(x3),1"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(expand_task_counts("4"), std::vector<int>{4});
  for (const char* wrong : {"", "x", "2(x)", "2(x0)", "2(3)", "2(x3", "2,", "-1", "2(x99999999)"})
    EXPECT_NE(error_of<ConfigError>([&] { expand_task_counts(wrong); }), "") << wrong;
}

}  // namespace
}  // namespace tessera
