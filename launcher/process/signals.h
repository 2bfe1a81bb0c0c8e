// SignalWatch: receives signals as events, in order, without handlers, and what stands for them on standard
// input. SignalPolicy: what they mean.
//
// How a launcher on another host hears of the end.
// sshd does not end a command whose client is gone: it closes the command's standard input. So the launcher
// of a run keeps the standard input of those on the hosts open, and its end is a SIGTERM to them: the ranks
// save and end as after a SIGTERM of the user. If a line break comes before the end, a rank on another host
// has failed: then the end is kFailureElsewhere, and the ranks end as after a failure on this host, within 2
// s, because they cannot save without that rank. A signal_byte() is a signal that the launcher of the run
// passes on.
#pragma once

#include <signal.h>

#include <chrono>
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

/// Whether it is one of the signals that can end a run when its launcher gets them.
bool ends_a_run(int signal);

/// The signals of "SIGUSR1,SIGTERM"; blanks around a name do not count. Throws ConfigError that names
/// `option` for a name that is none of those that end a run.
std::vector<int> parse_signals(const std::string& text, const std::string& option);

/// Comes in place of a signal's number.
inline constexpr int kFailureElsewhere = -1;
inline constexpr char kFailureByte = '\n';
inline char signal_byte(int signal) { return static_cast<char>('@' + signal); }

/// Receives this thread's signals during its lifetime. While it lives, SIGCHLD, SIGINT, SIGTERM, SIGTSTP and
/// the other signals that would end the process without a word (SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM,
/// SIGVTALRM, SIGXCPU, SIGPWR) are blocked in the calling thread and wait() receives them; all but the first
/// three only if they are not ignored (nohup). The destructor discards pending signals and restores the mask.
/// Other threads of the process should block these signals.
class SignalWatch {
 public:
  /// `input`: of the launcher of a run, whose bytes and end are received, too, at most 50 ms later; -1: none.
  explicit SignalWatch(SignalPolicy policy = {}, int input = -1);
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  ~SignalWatch();

  /// Waits for a signal, or kFailureElsewhere, and returns it; nullopt at the deadline, or after a second:
  /// then the caller looks which children have ended, for a thread that does not block SIGCHLD (OpenMP's) may
  /// have taken it.
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
  /// The signal that the next bytes of the input stand for, or its end; does not wait.
  std::optional<int> read_input();

  const SignalPolicy policy_;
  int input_;  ///< -1: none, or it has ended
  bool failure_elsewhere_ = false;
  sigset_t watched_{};
  sigset_t previous_mask_{};
  struct sigaction previous_child_action_{};
};

}  // namespace tessera::launcher
