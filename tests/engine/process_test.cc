// The engine on ranks that are processes, started by the launcher as `tessera launch` does.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <unistd.h>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "launcher/launch.h"
#include "tests/support/files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int kKilled = 128 + SIGKILL;

int launch(int nproc, const std::string& program, const std::vector<std::string>& args) {
  const fs::path logs =
      fs::temp_directory_path() / ("tessera_engine_process_test_" + std::to_string(getpid()));
  launcher::Options options;
  options.log_dir = logs.string();
  options.nproc = nproc;
  options.program = (fs::read_symlink("/proc/self/exe").parent_path() / program).string();
  options.args = args;
  const int code = launcher::run(options, Logger(LogOptions{}));
  if (code == 0 || code == kKilled) fs::remove_all(logs);
  return code;
}

int launch(int nproc, const std::string& what) { return launch(nproc, "engine_test_rank", {what}); }

TEST(Processes, ParityWithAPlainLoop) { EXPECT_EQ(launch(2, "parity"), 0); }

TEST(Processes, DropoutDrawsTheSameNumbersAtEveryStage) { EXPECT_EQ(launch(2, "dropout"), 0); }

// Hybrid communication on hosts of two ranks: a row shares memory, a column is on the network.
TEST(Processes, RowsOnHosts) { EXPECT_EQ(launch(4, "rows"), 0); }

TEST(Processes, AFailureIsSeen) {
  EXPECT_EQ(launch(2, "neither"), 1);
  fs::remove_all(fs::temp_directory_path() / ("tessera_engine_process_test_" + std::to_string(getpid())));
}

constexpr int kPoints = 8;

struct WholeRun {
  int64_t operators = 0;  // after the first save
  std::string result;
};

/// The run that nobody interrupts.
const WholeRun& whole_run(const std::string& stage) {
  static std::map<std::string, WholeRun> runs;
  if (!runs.contains(stage)) {
    const TemporaryFolder folder("tessera_deferred_update_whole");
    EXPECT_EQ(launch(2, "deferred_update_rank", {folder.path(), stage, "0"}), 0);
    runs[stage] = {std::stoll(read_text(folder.path() / "operators")), read_text(folder.path() / "result")};
  }
  return runs.at(stage);
}

/// With state on disk the updates of step N are carried out unit by unit in the forward of step N + 1.
/// Wherever a rank is killed in that, and in backward and saving, the last checkpoint gives the uninterrupted
/// run's bits.
class KilledInADeferredUpdate : public ::testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(KilledInADeferredUpdate, AndResumed) {
  const auto& [stage, point] = GetParam();
  const WholeRun& whole = whole_run(stage);
  ASSERT_GT(whole.operators, 2 * kPoints);
  const TemporaryFolder folder("tessera_deferred_update");
  const std::string at = std::to_string(1 + whole.operators * point / kPoints);
  EXPECT_EQ(launch(2, "deferred_update_rank", {folder.path(), stage, at}), kKilled);
  EXPECT_TRUE(fs::is_empty(folder.path() / "disk")) << "left on the disk";
  EXPECT_FALSE(fs::exists(folder.path() / "result"));
  EXPECT_EQ(launch(2, "deferred_update_rank", {folder.path(), stage, "0"}), 0);
  EXPECT_EQ(read_text(folder.path() / "result"), whole.result)
      << "killed at operator " << at << " of " << whole.operators;
}

INSTANTIATE_TEST_SUITE_P(All, KilledInADeferredUpdate,
                         ::testing::Combine(::testing::Values("2", "3"), ::testing::Range(0, kPoints)),
                         [](const auto& info) {
                           return "Stage" + std::string(std::get<0>(info.param)) + "Point" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace tessera
