// Supervisor: waits for the ranks, ends them all when one fails or the user
// says so, and tells how each ended.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "launcher/failure.h"
#include "launcher/guard.h"
#include "launcher/process.h"
#include "launcher/signals.h"

namespace tessera::launcher {

struct SupervisorOptions {
  std::chrono::milliseconds stop_grace{2000};   ///< from SIGTERM to SIGKILL after a failure
  std::chrono::milliseconds save_grace{30000};  ///< from the user's SIGINT or SIGTERM to SIGKILL
  std::vector<std::string> error_files;         ///< one a rank
};

struct Outcome {
  std::vector<RankExit> exits;        ///< in the order they ended; one a rank
  std::optional<int> interrupted_by;  ///< the signal by which the user ended the run
};

/// Refers to its arguments, which must outlive it. One thread: the one that spawned the ranks. The process
/// must have no children but these ranks, the guard and what they leave behind: any that ends is reaped.
class Supervisor {
 public:
  Supervisor(std::vector<Process>& ranks, Guard& guard, SignalWatch& signals, SupervisorOptions options,
             Logger log);
  /// Local. Blocks without using the CPU until no rank is left.
  Outcome supervise();

 private:
  using Clock = std::chrono::steady_clock;
  // kRunning -> a rank fails: kSettling -> kEnding -> kKilled; the user's signal: kInterrupted -> kKilled.
  enum class Phase { kRunning, kSettling, kEnding, kInterrupted, kKilled };

  void on_signal(int signal);
  void on_deadline();
  void collect_ended();
  void on_rank_ended(int rank);
  void interrupt(int signal);
  void suspend();
  void kill_all();
  void tell(size_t rank, int signal);
  void enter(Phase phase, std::chrono::milliseconds limit);

  std::vector<Process>& ranks_;
  Guard& guard_;
  SignalWatch& signals_;
  const SupervisorOptions options_;
  const Logger log_;
  Phase phase_ = Phase::kRunning;
  std::optional<Clock::time_point> deadline_;
  Clock::time_point interrupted_at_;
  size_t num_running_ = 0;
  std::vector<bool> told_to_end_;
  Outcome outcome_;
};

/// Local. Kills and reaps every child this process has: what ranks left behind in sessions of its own comes
/// to the launcher when its parent ends (PR_SET_CHILD_SUBREAPER). Gives up on unkillable ones after 2 s.
void end_orphans();

}  // namespace tessera::launcher
