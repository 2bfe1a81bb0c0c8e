// The engine on ranks that are processes, started by the launcher as `tessera launch` does.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <unistd.h>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "launcher/launch.h"

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

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Processes, ParityWithAPlainLoopAtEveryStage) {
  EXPECT_EQ(launch(2, "parity"), 0);
  EXPECT_EQ(launch(3, "parity"), 0);
}

TEST(Processes, DropoutDrawsTheSameNumbersAtEveryStage) { EXPECT_EQ(launch(2, "dropout"), 0); }

// Hybrid communication on hosts of two ranks: a row shares memory, a column is on the network.
TEST(Processes, RowsOnHosts) { EXPECT_EQ(launch(4, "rows"), 0); }

TEST(Processes, AFailureIsSeen) {
  EXPECT_EQ(launch(2, "neither"), 1);
  fs::remove_all(fs::temp_directory_path() / ("tessera_engine_process_test_" + std::to_string(getpid())));
}

// With state on disk the updates of step N are carried out unit by unit in the forward of step N + 1.
// Wherever a rank is killed in that, and in backward and saving, the last checkpoint gives the uninterrupted
// run's bits.
TEST(Processes, KilledInADeferredUpdateAndResumed) {
  constexpr int kPoints = 8;
  for (const std::string stage : {"2", "3"}) {
    const TemporaryFolder whole("tessera_deferred_update_whole");
    ASSERT_EQ(launch(2, "deferred_update_rank", {whole.path(), stage, "0"}), 0);
    const int64_t operators = std::stoll(contents(whole.path() / "operators"));
    ASSERT_GT(operators, 2 * kPoints);
    for (int point = 0; point < kPoints; ++point) {
      const TemporaryFolder folder("tessera_deferred_update");
      const std::string at = std::to_string(1 + operators * point / kPoints);
      EXPECT_EQ(launch(2, "deferred_update_rank", {folder.path(), stage, at}), kKilled) << "operator " << at;
      EXPECT_TRUE(fs::is_empty(folder.path() / "disk")) << "left on the disk";
      EXPECT_FALSE(fs::exists(folder.path() / "result"));
      EXPECT_EQ(launch(2, "deferred_update_rank", {folder.path(), stage, "0"}), 0);
      EXPECT_EQ(contents(folder.path() / "result"), contents(whole.path() / "result"))
          << "stage " << stage << ", killed at operator " << at << " of " << operators;
    }
  }
}

}  // namespace
}  // namespace tessera
