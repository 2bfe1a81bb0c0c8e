// Tee: what ranks write into files is shown as well: the output of all ranks with the rank in front of each
// line
// (--tee), and under ssh that of rank 0.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace tessera::launcher {

/// A file that a rank writes, and where it is shown.
struct ShownFile {
  std::string path;
  std::string prefix;  ///< in front of each line; empty: the bytes are passed on as they come
  int output_fd = 1;
};

/// Shows what ranks write to files. Owns a thread that follows the files, as torchrun's tailing does: a rank
/// writes to a file and never waits for a terminal, or for a connection that is stopped or gone. What the
/// output does not take stays in the file until it does. The destructor shows what is left, and gives up when
/// the output takes nothing for 2 s. The thread takes no signals. Requires: SIGPIPE is ignored, and SIGXFSZ.
class Tee {
 public:
  /// Follows the files from their beginning. No files: does nothing. `on_error`: called by the thread with
  /// the first errno of an output that fails otherwise than because its reader has gone.
  explicit Tee(std::vector<ShownFile> files, std::function<void(int)> on_error = {});
  Tee(const Tee&) = delete;
  Tee& operator=(const Tee&) = delete;
  ~Tee() = default;

 private:
  std::jthread thread_;
};

}  // namespace tessera::launcher
