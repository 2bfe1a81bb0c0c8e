#include "launcher/process/restarts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/str.h"

namespace tessera::launcher {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

int num_ranks(const RestartPolicy& policy, const std::vector<int>& members) {
  return std::accumulate(members.begin(), members.end(), 0, [&](int sum, int member) {
    return sum + policy.members[static_cast<size_t>(member)].num_ranks;
  });
}

/// Sets the arguments. Returns whether the program can run on these members.
bool prepare(const RestartPolicy& policy, Attempt& attempt) {
  if (!policy.arguments) return true;
  attempt.arguments = policy.arguments(num_ranks(policy, attempt.members));
  return attempt.arguments.has_value();
}

/// The members for the attempt after `last`.
Attempt without_lost(const RestartPolicy& policy, const Attempt& last, const std::vector<int>& lost) {
  Attempt next;
  next.restart_count = last.restart_count + 1;
  next.members = last.members;
  const auto fewest = static_cast<size_t>(policy.fewest);
  for (const int place : lost)
    if (fewest > 0 && next.members.size() > fewest)
      std::erase(next.members, last.members[static_cast<size_t>(place)]);
  for (; fewest > 0 && next.members.size() >= fewest; next.members.pop_back())
    if (prepare(policy, next)) return next;
  next.members = last.members;
  next.arguments = last.arguments;
  return next;
}

/// "2 ranks instead of 3, without host n2"
std::string describe_members(const RestartPolicy& policy, const Attempt& last, const Attempt& next) {
  const int before = num_ranks(policy, last.members), now = num_ranks(policy, next.members);
  const std::string ranks = str(now, now == 1 ? " rank" : " ranks");
  if (now == before) return ranks;
  std::vector<std::string> left_out;
  for (const int member : last.members)
    if (std::find(next.members.begin(), next.members.end(), member) == next.members.end())
      left_out.push_back(policy.members[static_cast<size_t>(member)].name);
  return str(ranks, " instead of ", before, ", without ", join(left_out, ", "));
}

}  // namespace

Attempt first_attempt(const RestartPolicy& policy) {
  Attempt first;
  first.members.resize(policy.members.size());
  std::iota(first.members.begin(), first.members.end(), 0);
  prepare(policy, first);
  return first;
}

NextStep next_step(const RestartPolicy& policy, const Attempt& last, const Ending& ending) {
  if (ending.exit_code == 0 || ending.was_asked || policy.max_restarts == 0) return {};
  if (ending.would_recur && (last.restart_count == 0 || last.follows_mistake))
    return {.message = "not restarted: the same error would occur again"};
  if (last.restart_count >= policy.max_restarts)
    return {.message = str("not restarted: --max-restarts ", policy.max_restarts, " is used up")};
  NextStep next;
  next.attempt = without_lost(policy, last, ending.lost);
  next.attempt->follows_mistake = ending.would_recur;
  next.message = str("restart ", next.attempt->restart_count, " of ", policy.max_restarts, ": ",
                     describe_members(policy, last, *next.attempt));
  return next;
}

int run_attempts(const RestartPolicy& policy, milliseconds time_limit, SignalWatch& signals,
                 const RunAttempt& run, const Logger& log) {
  const auto end = steady_clock::now() + time_limit;
  milliseconds left = time_limit;
  for (Attempt attempt = first_attempt(policy);;) {
    Ending ending = run(attempt, left);
    ending.was_asked |= signals.take_pending_end();
    NextStep next = next_step(policy, attempt, ending);
    if (next.attempt && time_limit.count() > 0) {
      left = std::chrono::duration_cast<milliseconds>(end - steady_clock::now());
      if (left.count() <= 0) {
        log.warning("not restarted: the run has taken as long as --timeout lets it");
        return kTimeoutExitCode;
      }
    }
    if (!next.message.empty()) log.warning(next.message);
    if (!next.attempt) return ending.exit_code;
    attempt = *std::move(next.attempt);
  }
}

}  // namespace tessera::launcher
