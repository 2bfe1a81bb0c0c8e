// SignalWatch: receives signals as events, in order, without handlers. SignalPolicy: what they mean.
#pragma once

#include <signal.h>

#include <chrono>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

/// Says what a signal to a launcher means. SIGUSR1 and SIGUSR2 go to the ranks, and the run goes on: it is
/// their program that decides. Any other ends the run, and so do those of `handled`.
struct SignalPolicy {
  /// --signals-to-handle of torchrun: they end the run, and the ranks get them as they are.
  std::vector<int> handled = {};
  /// SIGUSR2 stands for SIGTERM: mpirun or srun has handed it on (EngineCommand::end_signal).
  bool is_end_by_user_2 = false;

  bool is_handled(int signal) const;
  /// Whether the run goes on after this signal, which the ranks get.
  bool passes_on(int signal) const;
  /// What the ranks get for a signal that ends the run: programs that save handle SIGTERM, few handle SIGHUP.
  int for_ranks(int signal) const;
};

/// The signals of "SIGUSR1,SIGTERM"; blanks around a name do not count. Throws ConfigError that names
/// `option` for a name that is none of those that end a run.
std::vector<int> parse_signals(const std::string& text, const std::string& option);

/// Receives this thread's signals during its lifetime. While it lives, SIGCHLD, SIGINT, SIGTERM, SIGTSTP and
/// the other signals that would end the process without a word (SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM,
/// SIGVTALRM, SIGXCPU, SIGPWR) are blocked in the calling thread and wait() receives them; all but the first
/// three only if they are not ignored (nohup). The destructor discards pending signals and restores the mask.
/// No other thread of the process may receive these signals.
class SignalWatch {
 public:
  /// `extra`: more signals to receive.
  explicit SignalWatch(SignalPolicy policy = {}, std::initializer_list<int> extra = {});
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
  const SignalPolicy& policy() const { return policy_; }

 private:
  const SignalPolicy policy_;
  sigset_t watched_{};
  sigset_t previous_mask_{};
  struct sigaction previous_child_action_{};
};

}  // namespace tessera::launcher
