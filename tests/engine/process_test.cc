// The engine on ranks that are processes, started by the launcher as `tessera launch` does.
#include <gtest/gtest.h>

#include <filesystem>

#include "core/error.h"
#include "launcher/launch.h"

namespace tessera {
namespace {

int launch(int nproc, const std::string& what) {
  launcher::Options options;
  options.nproc = nproc;
  options.program = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "engine_test_rank").string();
  options.args = {what};
  return launcher::run(options, Logger({}));
}

TEST(Processes, ParityWithAPlainLoopAtEveryStage) {
  EXPECT_EQ(launch(2, "parity"), 0);
  EXPECT_EQ(launch(3, "parity"), 0);
}

TEST(Processes, DropoutDrawsTheSameNumbersAtEveryStage) { EXPECT_EQ(launch(2, "dropout"), 0); }

TEST(Processes, AFailureIsSeen) { EXPECT_EQ(launch(2, "neither"), 1); }

}  // namespace
}  // namespace tessera
