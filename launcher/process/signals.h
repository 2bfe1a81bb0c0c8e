// SignalWatch: receives signals as events, in order, without handlers.
#pragma once

#include <signal.h>

#include <chrono>
#include <initializer_list>
#include <optional>

namespace tessera::launcher {

/// Receives this thread's signals during its lifetime. While it lives, SIGCHLD, SIGINT, SIGTERM, SIGHUP and
/// SIGTSTP are blocked in the calling thread and wait() receives them; SIGHUP and SIGTSTP only if they are
/// not ignored (nohup). The destructor discards pending signals and restores the mask. No other thread of the
/// process may receive these signals.
class SignalWatch {
 public:
  /// `extra`: more signals to receive.
  explicit SignalWatch(std::initializer_list<int> extra = {});
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  ~SignalWatch();

  /// Waits for a signal and returns it; nullopt at the deadline. Without a deadline it waits without
  /// limit.
  std::optional<int> wait(std::optional<std::chrono::steady_clock::time_point> deadline);
  /// Whether a signal that ends a run has come which wait() has not returned. Discards what is
  /// pending.
  bool take_pending_end();
  /// Stops this process as Ctrl-Z does, and returns when it is continued.
  void stop_here();
  /// The thread's mask before, for children to start with.
  const sigset_t& previous_mask() const { return previous_mask_; }

 private:
  sigset_t watched_{};
  sigset_t previous_mask_{};
  struct sigaction previous_child_action_{};
};

}  // namespace tessera::launcher
