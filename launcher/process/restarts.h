// Restarts after a failure: whether the ranks of a run are started again, and how many. One decision for the
// ranks of a host and for the hosts of a run.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "launcher/process/signals.h"

namespace tessera::launcher {

/// Is the exit code of a run that has taken as long as --timeout lets it, as with timeout(1).
inline constexpr int kTimeoutExitCode = 124;

/// What a run can lose and go on without: a host with its ranks.
struct Member {
  std::string name;  ///< for messages: "host n1"
  int num_ranks = 1;
};

struct RestartPolicy {
  int max_restarts = 0;              ///< --max-restarts
  int fewest = 0;                    ///< MIN of --nnodes MIN:MAX; 0: all are needed
  std::vector<Member> members = {};  ///< of the first attempt
  /// The program's arguments on this many ranks; nullopt: it cannot run on so many. Unset: the same on any
  /// number.
  std::function<std::optional<std::vector<std::string>>(int num_ranks)> arguments = {};
};

/// One start of the ranks.
struct Attempt {
  int restart_count = 0;          ///< attempts before this one
  bool follows_mistake = false;   ///< the attempt before this one has ended with Ending::would_recur
  std::vector<int> members = {};  ///< that take part, by their place in RestartPolicy::members
  std::optional<std::vector<std::string>> arguments = {};  ///< of the program, where RestartPolicy has them
};

/// How an attempt has ended.
struct Ending {
  int exit_code = 0;
  bool was_asked = false;      ///< Ctrl-C, SIGTERM or --timeout has come, before a failure or after it
  bool would_recur = false;    ///< the error is one of the configuration, or of what it names
  std::vector<int> lost = {};  ///< members that are gone, by their place in Attempt::members
};

/// What follows: another attempt, or the end.
struct NextStep {
  std::optional<Attempt> attempt = {};
  std::string message = {};  ///< for the user; may be empty
};

/// The attempt that begins a run: all members.
Attempt first_attempt(const RestartPolicy& policy);

/// The decision after `last` has ended. A run that succeeded or was asked to end is not restarted, nor
/// one that has used all its restarts. Nor is one with an error of its configuration in the first attempt, or
/// in two in a row: after an attempt that began to train, it may be that of a disk or a lock, which passes.
/// If policy.fewest > 0, lost members are left out as long as that many remain, and then the last ones until
/// the program can run on the number of ranks. If it can run on none of these numbers, all members of `last`
/// are started again.
NextStep next_step(const RestartPolicy& policy, const Attempt& last, const Ending& ending);

/// What makes one attempt. `time_limit`: what is left of the run's; 0: none.
using RunAttempt = std::function<Ending(const Attempt& attempt, std::chrono::milliseconds time_limit)>;

/// Calls `run` for each attempt until next_step() has no other, and logs its messages. A signal that
/// has come between attempts counts as asked. Returns the exit code of the last attempt, or kTimeoutExitCode
/// where the run's time (0: no limit) is over before another.
int run_attempts(const RestartPolicy& policy, std::chrono::milliseconds time_limit, SignalWatch& signals,
                 const RunAttempt& run, const Logger& log);

}  // namespace tessera::launcher
