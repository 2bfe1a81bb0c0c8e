// Process: one rank in its own process group, which is killed as a whole.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::launcher {

// A process group for every rank.
// Ctrl-C goes to the terminal's foreground group, which contains only the launcher. The launcher forwards it,
// so that every rank gets it once, whether it was typed or sent by `kill`. And a group can be killed as a
// whole, with data loader workers and other children of a rank. The cost: ranks are background jobs of the
// terminal, which may stop one that reads from it (SIGTTIN), changes its modes or, under `stty tostop`,
// writes to it (SIGTTOU). Ranks ignore both signals, so that writes succeed, and reads fail instead of
// stopping the rank.

struct SpawnOptions {
  std::string program;                   ///< looked up in PATH if it has no '/'
  std::vector<std::string> args;         ///< argv[1], argv[2] …
  std::vector<std::string> environment;  ///< "NAME=value", complete
  int stdin_fd = -1;                     ///< -1: the launcher's own; also for the next two
  int stdout_fd = -1;
  int stderr_fd = -1;
  sigset_t signal_mask{};  ///< the initial signal mask
  std::vector<int> cores;  ///< the hardware threads that it may use; empty: as this process
};

/// Runs a child process in a group of its own. Owns a child process and its group. The kernel kills the child
/// (SIGKILL) when the thread that spawned it ends. The destructor kills the group of a running child and
/// reaps it. Move-only, not thread-safe.
class Process {
 public:
  /// Returns after the child's exec. Throws CommError with the program's name if it cannot be started.
  static Process spawn(const SpawnOptions& options);

  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  pid_t pid() const { return pid_; }
  bool running() const { return running_; }
  /// Whether the child has ended, collected or not.
  bool has_ended() const;
  /// Sends `signal` to every process of the group, if the child is running.
  void signal(int signal) const;
  /// Blocks until the child has ended, kills the rest of its group and returns its status as waitpid
  /// gives it.
  int collect();

 private:
  explicit Process(pid_t pid) : pid_(pid), running_(true) {}
  pid_t pid_ = -1;
  bool running_ = false;
};

}  // namespace tessera::launcher
