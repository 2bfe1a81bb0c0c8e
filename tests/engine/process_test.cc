// The engine on ranks that are processes, started by the launcher as `tessera launch` does.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include <unistd.h>

#include "core/error.h"
#include "launcher/launch.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

int launch(int nproc, const std::string& what) {
  const fs::path logs =
      fs::temp_directory_path() / ("tessera_engine_process_test_" + std::to_string(getpid()));
  launcher::Options options;
  options.log_dir = logs.string();
  options.nproc = nproc;
  options.program = (fs::read_symlink("/proc/self/exe").parent_path() / "engine_test_rank").string();
  options.args = {what};
  const int code = launcher::run(options, Logger(LogOptions{}));
  if (code == 0) fs::remove_all(logs);
  return code;
}

TEST(Processes, ParityWithAPlainLoopAtEveryStage) {
  EXPECT_EQ(launch(2, "parity"), 0);
  EXPECT_EQ(launch(3, "parity"), 0);
}

TEST(Processes, DropoutDrawsTheSameNumbersAtEveryStage) { EXPECT_EQ(launch(2, "dropout"), 0); }

TEST(Processes, AFailureIsSeen) {
  EXPECT_EQ(launch(2, "neither"), 1);
  fs::remove_all(fs::temp_directory_path() / ("tessera_engine_process_test_" + std::to_string(getpid())));
}

}  // namespace
}  // namespace tessera
