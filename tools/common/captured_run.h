// Launchers run in processes of their own, side by side, with what they print kept.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace tessera::tools {

struct CapturedRun {
  int exit_code = 0;  ///< 128 + signal if a signal ended it
  bool timed_out = false;
  std::string out, err;
};

/// Runs each of `bodies` in a fork of this process, all at the same time, and returns when all have
/// ended. What a body returns is its exit code; what it throws is printed to its standard error as `error:
/// ...`. After `limit` it gets SIGTERM, 10 s later SIGKILL. No other thread may run in this process.
std::vector<CapturedRun> run_captured(const std::vector<std::function<int()>>& bodies,
                                      std::chrono::seconds limit);

}  // namespace tessera::tools
