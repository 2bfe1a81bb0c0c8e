// Tee: what ranks write into their logs is shown as well, with the rank in front of each line (--tee).
#pragma once

#include <string>
#include <thread>
#include <vector>

namespace tessera::launcher {

/// The log of one rank.
struct RankLog {
  int rank = 0;
  std::string path;
};

/// Shows what ranks write to files. Owns a thread that follows the files, as torchrun's tailing does: a rank
/// writes to a file and never waits for a terminal. The destructor shows what is left. The thread takes no
/// signals.
class Tee {
 public:
  /// Follows the logs from their beginning. No logs: does nothing.
  Tee(std::vector<RankLog> logs, int output_fd);
  Tee(const Tee&) = delete;
  Tee& operator=(const Tee&) = delete;
  ~Tee() = default;

 private:
  std::jthread thread_;
};

}  // namespace tessera::launcher
