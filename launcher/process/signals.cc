#include "launcher/process/signals.h"

#include <string.h>  // sigabbrev_np

#include <algorithm>
#include <array>
#include <cerrno>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::launcher {
namespace {

constexpr std::array kEnding = {SIGTERM, SIGINT,  SIGHUP,    SIGQUIT, SIGUSR1,
                                SIGUSR2, SIGALRM, SIGVTALRM, SIGXCPU, SIGPWR};

bool is_ignored(int signal) {
  struct sigaction action{};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

bool SignalPolicy::is_handled(int signal) const {
  return std::find(handled.begin(), handled.end(), signal) != handled.end();
}

bool SignalPolicy::passes_on(int signal) const {
  return !is_handled(signal) && (signal == SIGUSR1 || (signal == SIGUSR2 && !is_end_by_user_2));
}

int SignalPolicy::for_ranks(int signal) const {
  const bool as_it_is = signal == SIGINT || (is_handled(signal) && !(signal == SIGUSR2 && is_end_by_user_2));
  return as_it_is ? signal : SIGTERM;
}

std::vector<int> parse_signals(const std::string& text, const std::string& option) {
  std::vector<int> signals;
  std::vector<std::string> names;
  for (const int signal : kEnding) names.push_back(str("SIG", ::sigabbrev_np(signal)));
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    item.erase(0, std::min(item.find_first_not_of(' '), item.size()));
    item.erase(item.find_last_not_of(' ') + 1);
    const auto found = std::find(names.begin(), names.end(), item);
    if (found == names.end())
      throw ConfigError(option, ": found ", quoted_name(item), "; expected some of ", join(names, ","));
    signals.push_back(kEnding[static_cast<size_t>(found - names.begin())]);
  }
  return signals;
}

SignalWatch::SignalWatch(SignalPolicy policy, std::initializer_list<int> extra) : policy_(std::move(policy)) {
  ::sigemptyset(&watched_);
  for (const int signal : extra) ::sigaddset(&watched_, signal);
  // SIGINT even if it is ignored, as in a script's background job: it must still end every rank.
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM}) ::sigaddset(&watched_, signal);
  if (!is_ignored(SIGTSTP)) ::sigaddset(&watched_, SIGTSTP);
  for (const int signal : kEnding)
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
    if (signal > 0 && signal != SIGCHLD && signal != SIGTSTP && !policy_.passes_on(signal)) has_come = true;
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
