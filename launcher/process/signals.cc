#include "launcher/process/signals.h"

#include <poll.h>
#include <string.h>  // sigabbrev_np
#include <unistd.h>

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

bool ends_a_run(int signal) { return std::find(kEnding.begin(), kEnding.end(), signal) != kEnding.end(); }

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

SignalWatch::SignalWatch(SignalPolicy policy, int input) : policy_(std::move(policy)), input_(input) {
  ::sigemptyset(&watched_);
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
  bool has_come = false;
  while (const auto signal = wait(std::chrono::steady_clock::now()))
    has_come |= *signal != SIGCHLD && *signal != SIGTSTP && !policy_.passes_on(*signal);
  return has_come;
}

// Not by signalfd(2): while this thread polls, another one that does not block a signal would take it.
std::optional<int> SignalWatch::wait(std::optional<std::chrono::steady_clock::time_point> deadline) {
  using namespace std::chrono;
  if (const auto signal = read_input()) return signal;
  nanoseconds limit = input_ >= 0 ? milliseconds(50) : seconds(1);
  if (deadline) limit = std::clamp<nanoseconds>(*deadline - steady_clock::now(), nanoseconds(0), limit);
  const timespec timeout{static_cast<time_t>(limit.count() / 1'000'000'000),
                         static_cast<long>(limit.count() % 1'000'000'000)};
  const int signal = ::sigtimedwait(&watched_, nullptr, &timeout);
  return signal > 0 ? std::optional(signal) : std::nullopt;
}

std::optional<int> SignalWatch::read_input() {
  constexpr int kMostBytes = 256;  // of a storm that says nothing, at a time
  for (int i = 0; i < kMostBytes && input_ >= 0; ++i) {
    pollfd polled{input_, POLLIN, 0};
    if (::poll(&polled, 1, 0) <= 0) return std::nullopt;
    char byte = 0;
    const ssize_t n = ::read(input_, &byte, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      input_ = -1;
      return failure_elsewhere_ ? kFailureElsewhere : SIGTERM;
    }
    if (byte == kFailureByte) failure_elsewhere_ = true;
    if (byte > '@') return byte - '@';
  }
  return std::nullopt;
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
