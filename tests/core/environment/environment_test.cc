// environment(): every variable set, unset and invalid.
#include "core/environment/environment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/environment/ended_ranks.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "core/variables.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::error_of;
using Variables = std::map<std::string, std::string>;

/// What environment() reads begins with one of these.
constexpr const char* kPrefixes[] = {"RANK",       "WORLD_SIZE",  "LOCAL_",    "GROUP_RANK",    "NODE_RANK",
                                     "CROSS_RANK", "MASTER_",     "TESSERA_",  "TORCHELASTIC_", "OMPI_",
                                     "PMIX_",      "PMI_",        "MPI_LOCAL", "HOROVOD_",      "SLURM_",
                                     "PET_",       "KUBERNETES_", "PBS_",      "LSB_"};

class EnvironmentTest : public ::testing::Test {
 protected:
  EnvironmentTest() { clear(); }
  ~EnvironmentTest() override { clear(); }

  static void set(const Variables& variables) {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  static void clear() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry; ++entry) {
      const std::string_view name = std::string_view(*entry).substr(0, std::string_view(*entry).find('='));
      if (std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                      [&](const char* prefix) { return name.starts_with(prefix); }))
        names.emplace_back(name);
    }
    for (const std::string& name : names) unsetenv(name.c_str());
  }
};

const Variables kGood = {{"RANK", "3"},        {"WORLD_SIZE", "4"},
                         {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "h"}, {"MASTER_PORT", "12345"}};

Variables good_but(Variables changes) {
  changes.insert(kGood.begin(), kGood.end());  // what is there already stays
  return changes;
}

TEST_F(EnvironmentTest, NothingSetIsOneRankAlone) {
  const Environment env = environment();
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_world_size, 1);
  set({{"MASTER_ADDR", "left over"}, {"MASTER_PORT", "nonsense"}});
  EXPECT_EQ(environment().world_size, 1) << "an address alone says nothing about a group";
}

TEST_F(EnvironmentTest, ReadsTorchrunsVariables) {
  set(good_but({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  const Environment env = environment();
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.master_addr, "h");
  EXPECT_EQ(env.master_port, 12345);
  EXPECT_TRUE(env.agent_store);
  EXPECT_EQ(env.restart_count, 2);
}

TEST_F(EnvironmentTest, TheLocalOnesDefaultToOneHost) {
  set({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(environment().local_rank, 1);
  EXPECT_EQ(environment().local_world_size, 2);
  EXPECT_FALSE(environment().agent_store);
}

TEST_F(EnvironmentTest, OneRankNeedsNoAddress) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(environment().world_size, 1);
  EXPECT_EQ(environment().restart_count, 0);
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"TORCHELASTIC_RESTART_COUNT", "3"}});
  EXPECT_EQ(environment().restart_count, 3) << "the last rank that is left is restarted too";
}

TEST_F(EnvironmentTest, NamesTheVariableThatIsWrong) {
  struct Case {
    const char* name;
    const char* value;  ///< null: unset
    const char* error;
  };
  const Case cases[] = {
      {"RANK", nullptr,
       "RANK is not set although WORLD_SIZE=4 is; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
       "together, or unset them"},
      {"WORLD_SIZE", nullptr,
       "WORLD_SIZE is not set although RANK=3 is; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
       "together, or unset them"},
      {"LOCAL_RANK", nullptr,
       "LOCAL_RANK is not set although LOCAL_WORLD_SIZE=2 is; set RANK, WORLD_SIZE, MASTER_ADDR and "
       "MASTER_PORT together, or unset them"},
      {"MASTER_ADDR", nullptr,
       "MASTER_ADDR is not set although WORLD_SIZE=4 is above 1: expected the address of rank 0's host"},
      {"MASTER_ADDR", "",
       "MASTER_ADDR is not set although WORLD_SIZE=4 is above 1: expected the address of rank 0's host"},
      {"MASTER_PORT", nullptr,
       "MASTER_PORT is not set although WORLD_SIZE=4 is above 1: expected a free port of rank 0's host"},
      {"RANK", "",
       "RANK is not set although WORLD_SIZE=4 is; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
       "together, or unset them"},
      {"RANK", "one", "RANK='one' is not an integer"},
      {"RANK", " 1", "RANK=' 1' is not an integer"},
      {"RANK", "1.0", "RANK='1.0' is not an integer"},
      {"RANK", "99999999999", "RANK='99999999999' is not an integer"},
      {"RANK", "4", "RANK=4 is out of range: expected 0 to 3, because WORLD_SIZE=4"},
      {"RANK", "-1", "RANK=-1 is out of range: expected 0 to 3, because WORLD_SIZE=4"},
      {"WORLD_SIZE", "0", "WORLD_SIZE=0 is out of range: expected 1 to 1048576"},
      {"WORLD_SIZE", "2x", "WORLD_SIZE='2x' is not an integer"},
      {"LOCAL_RANK", "2", "LOCAL_RANK=2 is out of range: expected 0 to 1, because LOCAL_WORLD_SIZE=2"},
      {"LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5 is out of range: expected 1 to 4, because WORLD_SIZE=4"},
      {"MASTER_PORT", "0", "MASTER_PORT=0 is out of range: expected 1 to 65535"},
      {"MASTER_PORT", "65536", "MASTER_PORT=65536 is out of range: expected 1 to 65535"},
      {"TESSERA_RUN_SECRET", "too short",
       "TESSERA_RUN_SECRET has 9 characters: expected at least 16, the same on all ranks (for example 32 "
       "hexadecimal digits)"},
      {"MASTER_PORT", "http", "MASTER_PORT='http' is not an integer"},
      {"TORCHELASTIC_RESTART_COUNT", "-2",
       "TORCHELASTIC_RESTART_COUNT=-2 is out of range: expected 0 to 1048576"},
  };
  for (const Case& wrong : cases) {
    Variables variables = kGood;
    variables.erase(wrong.name);
    if (wrong.value != nullptr) variables.emplace(wrong.name, wrong.value);
    set(variables);
    EXPECT_THROW(environment(), CommError) << wrong.error;
    EXPECT_EQ(error_of([] { environment(); }), wrong.error);
  }
}

TEST_F(EnvironmentTest, AnEmptyVariableSaysNothing) {
  Variables empty;
  for (const auto& [name, value] : kGood) empty.emplace(name, "");
  for (const char* name : {"SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"})
    empty.emplace(name, "");
  set(empty);
  EXPECT_FALSE(in_group());
  EXPECT_EQ(environment().world_size, 1);
  EXPECT_EQ(environment().launcher, "");
  EXPECT_EQ(text_variable("RANK"), std::nullopt);

  Variables some = kGood;
  for (const char* name : {"TESSERA_RENDEZVOUS_TIMEOUT_S", "TESSERA_RUN_SECRET", "TORCHELASTIC_RESTART_COUNT",
                           "TORCHELASTIC_USE_AGENT_STORE", "SLURM_PROCID", "SLURM_NTASKS"})
    some[name] = "";
  set(some);
  EXPECT_EQ(environment().rank, 3);
  EXPECT_EQ(environment().restart_count, 0);
  EXPECT_EQ(environment().rendezvous_timeout, std::nullopt);
}

TEST_F(EnvironmentTest, RanksThatHaveEndedAreListedBesideTheErrorFile) {
  const TemporaryFolder folder("environment_test");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  add_ended_rank((folder.path() / "error").string(), 2);
  set({{"TESSERA_ERROR_FILE", "error"}});
  EXPECT_EQ(ended_ranks(), std::vector<int>{2});
  set({{"TESSERA_ERROR_FILE", ""}});
  EXPECT_EQ(ended_ranks(), std::vector<int>()) << "an empty name is none";
  set({});
  EXPECT_EQ(ended_ranks(), std::vector<int>());
  std::filesystem::current_path(before);
}

}  // namespace
}  // namespace tessera
