#include "launcher/failure/supervisor.h"

#include <dirent.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <utility>

#include "core/environment/ended_ranks.h"
#include "core/environment/finishing.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

using std::chrono::milliseconds;

/// The time after the first failure in which other ranks may fail by themselves and report their errors. It
/// is longer if the first rank has reported an error, since the others may be about to find the same one.
constexpr milliseconds kSettle{100}, kSettleAfterReport{1000};
/// From SIGTERM to SIGKILL after a failure.
constexpr milliseconds kGraceAfterFailure{2000};
/// What children that finish what a rank has begun have when all ranks have ended.
constexpr std::chrono::seconds kFinishTime{10};
/// A second SIGINT within this time is ignored: `timeout -s INT` sends it to its child and to its group.
constexpr milliseconds kSameInterrupt{200};

/// The parent of a process, from /proc/PID/stat, "pid (name) state ppid ..."; 0 if the process has ended.
pid_t parent_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > line.size()) return 0;
  return std::atoi(line.c_str() + name_end + 4);
}

/// Whether a signal would end a process, which has no handler for it, or not yet, and does not ignore or
/// block it. /proc/PID/status has masks in hexadecimal.
bool would_end(pid_t pid, int signal) {
  std::ifstream file(str("/proc/", pid, "/status"));
  uint64_t mask = 0, taken = 0;
  int num_masks = 0;
  for (std::string name; file >> name; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
    if ((name == "SigBlk:" || name == "SigIgn:" || name == "SigCgt:") && file >> std::hex >> mask) {
      taken |= mask;
      ++num_masks;
    }
  return num_masks == 3 && (taken >> (signal - 1) & 1) == 0;
}

std::vector<pid_t> children() {
  std::vector<pid_t> found;
  DIR* proc = ::opendir("/proc");
  if (!proc) return found;
  while (const dirent* entry = ::readdir(proc)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid > 0 && parent_of(entry->d_name) == ::getpid()) found.push_back(pid);
  }
  ::closedir(proc);
  return found;
}

/// Whether a process was started to finish what a rank has begun (kFinishesVariable).
bool finishes(pid_t pid) {
  std::ifstream file(str("/proc/", pid, "/environ"));
  for (std::string variable; std::getline(file, variable, '\0');)
    if (variable == str(kFinishesVariable, "=1")) return true;
  return false;
}

void end_children_but(const std::vector<pid_t>& kept) {
  using Clock = std::chrono::steady_clock;
  const auto finish_by = Clock::now() + kFinishTime;
  for (auto give_up = Clock::now() + std::chrono::seconds(2); Clock::now() < give_up;) {
    int num_left = 0;
    for (const pid_t child : children()) {
      if (std::find(kept.begin(), kept.end(), child) != kept.end()) continue;
      ++num_left;
      if (Clock::now() < finish_by && finishes(child))
        give_up = Clock::now() + std::chrono::seconds(2);
      else
        ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, WNOHANG);
    }
    if (num_left == 0) return;
    ::usleep(1000);  // the next round adopts the children of those that were killed
  }
}

}  // namespace

Supervisor::Supervisor(std::vector<Process>& ranks, Guard& guard, SignalWatch& signals,
                       SupervisorOptions options, Logger log)
    : ranks_(ranks),
      guard_(guard),
      signals_(signals),
      options_(std::move(options)),
      log_(std::move(log)),
      num_running_(ranks.size()),
      signalled_(ranks.size()) {}

Outcome Supervisor::supervise() {
  if (options_.timeout.count() > 0) deadline_ = Clock::now() + options_.timeout;
  while (num_running_ > 0) {
    std::optional<Clock::time_point> until = deadline_;
    if (!undelivered_.empty()) {
      const auto next = Clock::now() + milliseconds(50);
      until = until ? std::min(*until, next) : next;
    }
    if (const auto signal = signals_.wait(until)) on_signal(*signal);
    deliver();
    collect_ended();
    if (deadline_ && Clock::now() >= *deadline_) on_deadline();
  }
  return std::move(outcome_);
}

void Supervisor::on_signal(int signal) {
  if (signal == SIGCHLD) return;  // handled by collect_ended(): one signal may stand for several exits
  if (signal == SIGTSTP) return suspend();
  if (signal == kFailureElsewhere) return on_failure_elsewhere();
  if (signals_.policy().passes_on(signal)) return pass_on(signal);
  outcome_.was_asked = true;  // in any phase
  if (phase_ == Phase::kRunning) return interrupt(signal);
  if (signal != SIGINT || phase_ == Phase::kKilled) return;  // the ranks are ending already
  if (phase_ == Phase::kInterrupted && Clock::now() - interrupted_at_ < kSameInterrupt) return;
  log_.warning(str("killing ", num_running_, " ranks"));
  kill_all();
}

void Supervisor::interrupt(int signal) {
  outcome_.was_asked = true;
  outcome_.interrupted_by = signal;
  interrupted_at_ = Clock::now();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) send_signal(rank, signals_.policy().for_ranks(signal));
  enter(Phase::kInterrupted, options_.save_grace);
  log_.warning(str(signal_name(signal), ": ", num_running_, num_running_ == 1 ? " rank has " : " ranks have ",
                   options_.save_grace.count() / 1000.0, " s to end; Ctrl-C",
                   signal == SIGINT ? " again" : "", " kills them"));
}

/// A program that has just been started has no handler yet, and the default action would end it.
void Supervisor::pass_on(int signal) {
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    if (ranks_[rank].running()) undelivered_.insert({rank, signal});
  deliver();
  const auto is_left = [&](const auto& one) { return one.second == signal; };
  const auto num_left = std::count_if(undelivered_.begin(), undelivered_.end(), is_left);
  const auto num_told = static_cast<int64_t>(num_running_) - num_left;
  log_.info(str(signal_name(signal), ": passed on to ", num_told, num_told == 1 ? " rank" : " ranks",
                num_left > 0
                    ? str("; ", num_left, " without a handler would end, and get it once they have one")
                    : ""));
}

void Supervisor::deliver() {
  std::erase_if(undelivered_, [&](const auto& one) {
    const auto& [rank, signal] = one;
    if (ranks_[rank].running() && would_end(ranks_[rank].pid(), signal)) return false;
    if (ranks_[rank].running()) ::kill(ranks_[rank].pid(), signal);
    return true;
  });
}

void Supervisor::on_failure_elsewhere() {
  outcome_.was_asked = true;
  if (phase_ != Phase::kRunning) return;
  outcome_.interrupted_by = SIGTERM;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) send_signal(rank, SIGTERM);
  enter(Phase::kInterrupted, kGraceAfterFailure);
}

void Supervisor::suspend() {
  for (const Process& rank : ranks_) rank.signal(SIGTSTP);
  const Clock::time_point stopped_at = Clock::now();
  signals_.stop_here();
  if (deadline_) *deadline_ += Clock::now() - stopped_at;
  for (const Process& rank : ranks_) rank.signal(SIGCONT);
}

void Supervisor::on_deadline() {
  deadline_.reset();
  switch (phase_) {
    case Phase::kSettling:
      // A rank that has reported an error is ending by itself, with an exit code of its own.
      for (size_t rank = 0; rank < ranks_.size(); ++rank)
        if (::access(options_.error_files[rank].c_str(), F_OK) != 0) send_signal(rank, SIGTERM);
      enter(Phase::kEnding, kGraceAfterFailure);
      break;
    case Phase::kInterrupted:
      log_.warning(str(num_running_, " ranks did not end in time and are killed"));
      kill_all();
      break;
    case Phase::kEnding: kill_all(); break;
    case Phase::kRunning:
      outcome_.timed_out = true;
      log_.warning("--timeout: the run has taken as long as it may and is ended");  // with earlier attempts
      interrupt(SIGTERM);
      break;
    case Phase::kKilled: break;
  }
}

void Supervisor::kill_all() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) send_signal(rank, SIGKILL);
  phase_ = Phase::kKilled;
  deadline_.reset();
}

void Supervisor::send_signal(size_t rank, int signal) {
  if (!ranks_[rank].running()) return;
  signalled_[rank] = true;
  if (signal == SIGINT || signal == SIGTERM || signal == SIGKILL) return ranks_[rank].signal(signal);
  ::kill(ranks_[rank].pid(), signal);  // its children have no handler, or a copy of the rank's
}

void Supervisor::enter(Phase phase, milliseconds limit) {
  phase_ = phase;
  deadline_ = Clock::now() + limit;
}

void Supervisor::collect_ended() {
  for (;;) {
    siginfo_t info{};  // WNOWAIT: Process::collect() reaps it
    const int rc = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT);
    if (rc < 0 && errno == EINTR) continue;
    if (rc < 0 || info.si_pid == 0) return;
    const auto is_this = [&](const Process& rank) { return rank.running() && rank.pid() == info.si_pid; };
    const auto rank = std::find_if(ranks_.begin(), ranks_.end(), is_this);
    if (rank != ranks_.end())
      on_rank_ended(static_cast<int>(rank - ranks_.begin()));
    else
      ::waitpid(info.si_pid, nullptr, 0);  // an orphan of a rank
  }
}

void Supervisor::on_rank_ended(int rank) {
  RankExit exit;
  exit.rank = options_.first_rank + rank;
  exit.time_ns = monotonic_ns();
  exit.signalled = signalled_[rank];
  guard_.forget(ranks_[rank].pid());  // before collect(): after it another process may get the number
  exit.status = ranks_[rank].collect();
  exit.report = read_error_report(options_.error_files[rank]);
  --num_running_;
  outcome_.exits.push_back(exit);
  if (exit.status == 0) return add_ended_rank(options_.error_files[rank], exit.rank);
  if (phase_ == Phase::kRunning) enter(Phase::kSettling, exit.report ? kSettleAfterReport : kSettle);
  // If a rank crashes while saving, the others wait for it and do not end by themselves.
  const bool crashed =
      WIFSIGNALED(exit.status) && WTERMSIG(exit.status) != SIGTERM && WTERMSIG(exit.status) != SIGINT;
  if (phase_ == Phase::kInterrupted && crashed)
    deadline_ = std::min(*deadline_, Clock::now() + kGraceAfterFailure);
}

Subreaper::Subreaper() : kept_(children()) {
  ::prctl(PR_GET_CHILD_SUBREAPER, &previous_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Subreaper::~Subreaper() {
  end_children_but(kept_);
  ::prctl(PR_SET_CHILD_SUBREAPER, previous_);
}

}  // namespace tessera::launcher
