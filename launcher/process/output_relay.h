// OutputRelay: takes what rank 0 writes, so that it can go on writing when the one that started this launcher
// is gone.
#pragma once

#include <thread>

#include "core/files/file_descriptor.h"

namespace tessera::launcher {

// Output without a reader.
// When the connection to a host breaks, or the launcher of the run is killed, sshd closes its ends of the
// output of this host's launcher. A rank that had inherited them would get SIGPIPE at its next write, or an
// exception, before it has saved. So it writes to a pipe of this launcher, which passes on what it can.

/// Copies what ranks write to this process's output. Owns two pipes, and a thread that copies them to this
/// process's standard output and standard error, and drops what cannot be written. SIGPIPE must be ignored.
/// The destructor copies what is left.
class OutputRelay {
 public:
  /// Copies from now on if `active`. Throws CommError if no pipe can be made.
  explicit OutputRelay(bool active);
  OutputRelay(const OutputRelay&) = delete;
  OutputRelay& operator=(const OutputRelay&) = delete;
  ~OutputRelay() = default;

  /// What rank 0 gets as its standard output and standard error; -1: this process's own.
  int stdout_fd() const { return out_.get(); }
  int stderr_fd() const { return err_.get(); }

 private:
  FileDescriptor out_, err_;
  std::jthread thread_;
};

}  // namespace tessera::launcher
