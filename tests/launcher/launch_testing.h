// Fixture for tests of the launcher with real processes; tests/launcher/test_rank.cc defines the actions.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/error.h"
#include "launcher/launch.h"
#include "tests/launcher/tool.h"

namespace tessera::launcher {

using testing::all_gone;
using testing::Folder;
using testing::launch_args;
using testing::Tool;

class LaunchTest : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("TMPDIR", temporary_.path().c_str(), 1); }
  void TearDown() override { ::unsetenv("TMPDIR"); }

  /// Runs to the end and returns the exit code.
  int run_tool(int nproc, const std::vector<std::string>& action,
               const std::vector<std::string>& flags = {}) {
    Tool tool(folder_, launch_args(folder_, nproc, action, flags));
    return tool.wait();
  }
  std::string errors() const { return folder_.read("tool.err"); }
  std::string output() const { return folder_.read("tool.out"); }
  bool nothing_runs() const { return all_gone(folder_.pids()); }
  std::string refusal(const Options& options) const {
    try {
      run(options, Logger());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  Folder folder_;     // the ranks' files
  Folder temporary_;  // the launcher's TMPDIR
};

}  // namespace tessera::launcher
