// Restarts after a failure: whether the ranks of a run are started again, and how many. One decision for the
// ranks of a host and for the hosts of a run.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"

namespace tessera::launcher {

/// What a run can lose and go on without: a rank of this host, or a host with its ranks.
struct Member {
  std::string name;  ///< for messages: "rank 2", "host n1"
  int num_ranks = 1;
};

struct RestartPolicy {
  int max_restarts = 0;              ///< --max-restarts
  int fewest = 0;                    ///< MIN of --nproc or --nnodes MIN:MAX, in members; 0: all are needed
  std::vector<Member> members = {};  ///< of the first attempt
  /// The program's arguments on this many ranks; nullopt: it cannot run on so many. Unset: the same on any
  /// number.
  std::function<std::optional<std::vector<std::string>>(int num_ranks)> arguments = {};
};

/// One start of the ranks.
struct Attempt {
  int restart_count = 0;          ///< attempts before this one
  std::vector<int> members = {};  ///< that take part, by their place in RestartPolicy::members
  std::optional<std::vector<std::string>> arguments = {};  ///< of the program, where RestartPolicy has them
};

/// How an attempt has ended.
struct Ending {
  int exit_code = 0;
  bool was_asked = false;      ///< Ctrl-C, SIGTERM or --timeout has come, before a failure or after it
  bool would_recur = false;    ///< the error is one of the configuration
  std::vector<int> lost = {};  ///< members that are gone, by their place in Attempt::members
};

/// What follows: another attempt, or the end.
struct NextStep {
  std::optional<Attempt> attempt = {};
  std::string message = {};  ///< for the user; may be empty
};

/// The time of a run, which all its attempts share. Begins when it is made.
class TimeLimit {
 public:
  /// 0: no limit.
  explicit TimeLimit(std::chrono::milliseconds limit)
      : limit_(limit), end_(std::chrono::steady_clock::now() + limit) {}
  /// Local. What is left when `attempt` begins, at least 1 ms; 0: no limit.
  std::chrono::milliseconds left(const Attempt& attempt) const;

 private:
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point end_;
};

/// Local. The attempt that begins a run: all members.
Attempt first_attempt(const RestartPolicy& policy);

/// Local. The decision after `last` has ended. A run that succeeded, was asked to end, or found an error of
/// its configuration is not restarted, nor one that has used all its restarts. If policy.fewest > 0, lost
/// members are left out as long as that many remain, and then the last ones until the program can run on the
/// number of ranks. If it can run on none of these numbers, all members of `last` are started again.
NextStep next_step(const RestartPolicy& policy, const Attempt& last, const Ending& ending);

/// Local. Calls `run` for each attempt until next_step() has no other, and logs its messages. Returns the
/// exit code of the last attempt.
int run_attempts(const RestartPolicy& policy, const std::function<Ending(const Attempt&)>& run,
                 const Logger& log);

}  // namespace tessera::launcher
