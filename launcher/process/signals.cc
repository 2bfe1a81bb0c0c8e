#include "launcher/process/signals.h"

#include <algorithm>
#include <cerrno>

namespace tessera::launcher {
namespace {

bool is_ignored(int signal) {
  struct sigaction action{};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalWatch::SignalWatch(std::initializer_list<int> extra) {
  ::sigemptyset(&watched_);
  for (const int signal : extra) ::sigaddset(&watched_, signal);
  // SIGINT even if it is ignored, as in a script's background job: it must still end every rank.
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM}) ::sigaddset(&watched_, signal);
  for (const int signal : {SIGHUP, SIGTSTP})
    if (!is_ignored(signal)) ::sigaddset(&watched_, signal);
  ::pthread_sigmask(SIG_BLOCK, &watched_, &previous_mask_);
  // An inherited SIG_IGN for SIGCHLD would make the kernel reap the ranks and lose their status.
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, &previous_child_action_);
}

SignalWatch::~SignalWatch() {
  take_pending_end();
  ::sigaction(SIGCHLD, &previous_child_action_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
}

bool SignalWatch::take_pending_end() {
  const timespec now{};
  bool has_come = false;
  for (;;) {
    errno = 0;
    const int signal = ::sigtimedwait(&watched_, nullptr, &now);
    if (signal < 0 && errno != EINTR) return has_come;
    if (signal > 0 && signal != SIGCHLD && signal != SIGTSTP) has_come = true;
  }
}

std::optional<int> SignalWatch::wait(std::optional<std::chrono::steady_clock::time_point> deadline) {
  using namespace std::chrono;
  for (;;) {
    int signal = 0;
    if (deadline) {
      const auto left = std::max(duration_cast<nanoseconds>(*deadline - steady_clock::now()), nanoseconds(0));
      const timespec timeout{static_cast<time_t>(left.count() / 1'000'000'000),
                             static_cast<long>(left.count() % 1'000'000'000)};
      signal = ::sigtimedwait(&watched_, nullptr, &timeout);
    } else {
      signal = ::sigwaitinfo(&watched_, nullptr);
    }
    if (signal > 0) return signal;
    if (errno != EINTR) return std::nullopt;  // EAGAIN: the deadline
  }
}

void SignalWatch::stop_here() {
  // SIGTSTP with its default action, not SIGSTOP: the kernel ignores it for a process group that no shell
  // could continue.
  sigset_t stop;
  ::sigemptyset(&stop);
  ::sigaddset(&stop, SIGTSTP);
  ::raise(SIGTSTP);
  ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

}  // namespace tessera::launcher
