// Process: one rank, in a process group of its own, so that whatever it starts ends with it.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::launcher {

// [Note: a process group for every rank]
// Ctrl-C goes to the terminal's foreground group, which is the launcher's alone: the launcher passes it on,
// and every rank sees it once, typed or sent by `kill`. And a group can be killed as a whole, with data
// loader workers and whatever else a rank has started. The price: ranks are background jobs to the terminal,
// which may stop one that reads from it (SIGTTIN), changes its modes, or, under `stty tostop`, writes to it
// (SIGTTOU). Both signals are ignored in ranks: writes then pass, and reads fail instead of hanging.

struct SpawnOptions {
  std::string program;                   ///< looked up in PATH when there is no '/' in it
  std::vector<std::string> args;         ///< argv[1] and on
  std::vector<std::string> environment;  ///< "NAME=value", all of it
  int stdin_fd = -1;                     ///< -1: the launcher's own, here and below
  int stdout_fd = -1;
  int stderr_fd = -1;
  sigset_t signal_mask{};  ///< the mask it starts with
};

/// Owns a child process and its group. Move-only, not thread-safe. The kernel kills the
/// child (SIGKILL) when the thread that spawned it ends, however that comes. Destroying a
/// running one kills its group and reaps it.
class Process {
 public:
  /// Local. Returns once the program runs. Throws CommError with the program's
  /// name when it cannot be started.
  static Process spawn(const SpawnOptions& options);

  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  pid_t pid() const { return pid_; }
  bool running() const { return running_; }
  /// Local. Sends `signal` to every process of the group; nothing when it is no longer running.
  void signal(int signal) const;
  /// Local. Waits for the end (which must have come, or this blocks), kills what is left of the group,
  /// and returns the status as waitpid gives it.
  int collect();

 private:
  explicit Process(pid_t pid) : pid_(pid), running_(true) {}
  pid_t pid_ = -1;
  bool running_ = false;
};

}  // namespace tessera::launcher
