// SignalWatch: takes signals as events, in order, instead of in handlers.
#pragma once

#include <signal.h>

#include <chrono>
#include <optional>

namespace tessera::launcher {

/// While it lives, the calling thread has SIGCHLD, SIGINT, SIGTERM, SIGHUP and SIGTSTP blocked and wait()
/// takes them; SIGHUP and SIGTSTP only when they are not ignored (nohup). The destructor drops what has come
/// and not been taken, and restores the mask. No other thread of the process may take these signals.
class SignalWatch {
 public:
  SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  ~SignalWatch();

  /// Local. Sleeps until a signal comes, and returns it, or until the deadline (none: for ever).
  std::optional<int> wait(std::optional<std::chrono::steady_clock::time_point> deadline);
  /// Local. Stops this process as Ctrl-Z would have, and returns when it is continued.
  void stop_here();
  /// The mask that was there before, which children should start with.
  const sigset_t& previous_mask() const { return previous_mask_; }

 private:
  sigset_t watched_{};
  sigset_t previous_mask_{};
  struct sigaction previous_child_action_{};
};

}  // namespace tessera::launcher
