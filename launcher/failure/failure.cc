#include "launcher/failure/failure.h"

#include <signal.h>
#include <string.h>  // sigabbrev_np, sigdescr_np
#include <sys/wait.h>

#include <algorithm>
#include <cctype>

#include "core/str.h"

namespace tessera::launcher {
namespace {

bool is_fatal_signal(int signal) {
  switch (signal) {
    case SIGSEGV:
    case SIGBUS:
    case SIGILL:
    case SIGFPE:
    case SIGSYS:
    case SIGTRAP:
    case SIGKILL: return true;
    default: return false;  // SIGABRT too: an uncaught "connection closed by peer" ends in it
  }
}

int64_t failure_time_ns(const RankExit& exit) {
  if (exit.report) return exit.report->time_ns;
  const bool died_by_itself = WIFSIGNALED(exit.status) && is_fatal_signal(WTERMSIG(exit.status));
  return exit.time_ns - (died_by_itself ? kSignalHeadStartNs : 0);
}

bool ended_by_launcher(const RankExit& exit) {
  if (!exit.signalled || !WIFSIGNALED(exit.status)) return false;
  return WTERMSIG(exit.status) == SIGTERM || WTERMSIG(exit.status) == SIGKILL;
}

}  // namespace

bool crashed(const RankExit& exit) {
  return WIFSIGNALED(exit.status) && is_fatal_signal(WTERMSIG(exit.status)) &&
         WTERMSIG(exit.status) != SIGKILL;
}

const RankExit* root_cause(const std::vector<RankExit>& exits) {
  const auto is_consequence = [](const RankExit& exit) { return exit.report && exit.report->of_peer; };
  const auto is_before = [&](const RankExit& a, const RankExit& b) {
    if (is_consequence(a) != is_consequence(b)) return is_consequence(b);
    return failure_time_ns(a) < failure_time_ns(b);
  };
  const RankExit* first = nullptr;
  for (const RankExit& exit : exits) {
    if (exit.status == 0 || (exit.signalled && !exit.report && !crashed(exit))) continue;
    if (!first || is_before(exit, *first)) first = &exit;
  }
  return first;
}

std::optional<std::string> common_error(const std::vector<RankExit>& exits) {
  const auto is_alike = [&](const RankExit& exit) {
    return exit.status != 0 && exit.report && exit.report->message == exits.front().report->message;
  };
  if (exits.empty() || !exits.front().report || !std::all_of(exits.begin(), exits.end(), is_alike))
    return std::nullopt;
  return exits.front().report->message;
}

int exit_code(const RankExit& exit) { return ended_by_launcher(exit) ? 1 : exit_code(exit.status); }

int exit_code(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

std::string describe_status(int status) {
  if (WIFEXITED(status)) return str("exit code ", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  const char* description = ::sigdescr_np(signal);
  if (!description) return signal_name(signal);
  std::string text = description;
  text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return str(signal_name(signal), " (", text, ")");
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? str("SIG", name) : str("signal ", signal);
}

}  // namespace tessera::launcher
