// StdinWatch: ends this launcher when the one that started it on this host is gone.
#pragma once

#include <signal.h>
#include <sys/types.h>

namespace tessera::launcher {

// How a launcher on another host hears of the end.
// sshd does not end a command whose client is gone: it closes the command's standard input. So the launcher
// of a run keeps the standard input of those on the hosts open, and this process, which waits for its end,
// sends its parent SIGTERM; then the ranks save and end as after a SIGTERM of the user. If a line break comes
// before the end, a rank on another host has failed: then it sends kFailureElsewhere, and the ranks end as
// after a failure on this host, within SupervisorOptions::stop_grace, because they cannot save without that
// rank. A signal_byte() is a signal that the launcher of the run passes on: it comes at once.

/// The signal for it. A launcher on a host receives it (SignalWatch). No user sends it.
inline const int kFailureElsewhere = SIGRTMIN;

inline constexpr char kFailureByte = '\n';
inline char signal_byte(int signal) { return static_cast<char>('@' + signal); }

/// Notices the end of standard input. Owns a child process, a fork without exec as Guard's. The destructor
/// ends it.
class StdinWatch {
 public:
  /// Watches from now on if `active`. Throws CommError if the process cannot be created.
  explicit StdinWatch(bool active);
  StdinWatch(const StdinWatch&) = delete;
  StdinWatch& operator=(const StdinWatch&) = delete;
  ~StdinWatch();

 private:
  pid_t pid_ = -1;
};

}  // namespace tessera::launcher
