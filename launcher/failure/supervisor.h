// Supervisor: waits for the ranks, ends all of them when one fails or the user interrupts the run, and
// returns how each ended.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/log.h"
#include "launcher/failure/failure.h"
#include "launcher/process/guard.h"
#include "launcher/process/process.h"
#include "launcher/process/signals.h"

namespace tessera::launcher {

struct SupervisorOptions {
  std::chrono::milliseconds save_grace{30000};  ///< from the user's SIGINT or SIGTERM to SIGKILL
  std::vector<std::string> error_files;         ///< one per rank of this host
  int first_rank = 0;                           ///< the number of the first one in the run
  std::chrono::milliseconds timeout{0};         ///< of the run, which is then ended as by SIGTERM; 0: none
};

struct Outcome {
  std::vector<RankExit> exits;        ///< one per rank, in the order of their ends
  std::optional<int> interrupted_by;  ///< the signal that interrupted the run
  bool timed_out = false;             ///< it was the run's time limit
  bool was_asked = false;  ///< the launcher was told to end the run, or its time is up; also after a failure
};

/// Watches the ranks until they have ended, and ends the others when one fails. Borrows its arguments, which
/// must outlive it. Used by the thread that spawned the ranks. The process must have no children except the
/// ranks, the guard and orphans of the ranks: every child that ends is reaped.
class Supervisor {
 public:
  Supervisor(std::vector<Process>& ranks, Guard& guard, SignalWatch& signals, SupervisorOptions options,
             Logger log);
  /// Blocks until all ranks have ended.
  Outcome supervise();

 private:
  using Clock = std::chrono::steady_clock;
  // After a failure: kRunning -> kSettling -> kEnding -> kKilled. After a signal to the launcher: kRunning ->
  // kInterrupted -> kKilled.
  enum class Phase { kRunning, kSettling, kEnding, kInterrupted, kKilled };

  void on_signal(int signal);
  void on_deadline();
  void collect_ended();
  void on_rank_ended(int rank);
  void interrupt(int signal);
  void pass_on(int signal);
  void deliver();  ///< undelivered_ signals, to ranks that have a handler
  void on_failure_elsewhere();
  void suspend();
  void kill_all();
  void send_signal(size_t rank, int signal);
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
  std::vector<bool> signalled_;
  std::set<std::pair<size_t, int>> undelivered_;  ///< ranks and signals that they have no handler for yet
  Outcome outcome_;
};

/// Makes this process the parent of its orphaned descendants during its lifetime, such as processes that
/// ranks have started in other sessions (PR_SET_CHILD_SUBREAPER). The destructor kills and reaps every child
/// but those that this process had before; it gives up after 2 s.
class Subreaper {
 public:
  Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;
  ~Subreaper();

 private:
  std::vector<pid_t> kept_;
  int previous_ = 0;
};

}  // namespace tessera::launcher
