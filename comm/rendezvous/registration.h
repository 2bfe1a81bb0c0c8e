// Which ranks are at the rendezvous, and whether all mean the same group: each writes what it is under its
// number, and reads what the others are.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/control/group_store.h"
#include "core/environment/environment.h"
#include "core/log.h"

namespace tessera::comm {

/// Names and values that must be equal on all ranks.
using Settings = std::map<std::string, std::string>;

/// Has what a rank publishes of itself.
struct RankInfo {
  std::string domain;     ///< equal for ranks that reach each other over the loopback interface
  std::string may_share;  ///< equal for ranks that may share memory
  std::string process;    ///< for messages
  std::string endpoint;   ///< Liveness::endpoint()
  Settings settings;
};

/// Limits the time of a rendezvous, and says what it waits for. One thread at a time.
class WaitLimit {
 public:
  WaitLimit(std::chrono::milliseconds timeout, const Logger& log, const std::function<void()>& interrupt);
  std::chrono::milliseconds timeout() const { return timeout_; }
  /// Returns at least 1 ms.
  std::chrono::milliseconds left() const;
  /// Has to be called now and then: calls `interrupt`, which may throw, and logs `describe()` after 5 s and
  /// then every minute.
  void still_waiting(const std::function<std::string()>& describe);

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::milliseconds timeout_;
  const Logger log_;
  const std::function<void()> interrupt_;
  const Clock::time_point deadline_ = Clock::now() + timeout_;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(5);
};

/// Throws CommError if the launcher says that rank 0 has ended with exit code 0. For a rank that waits for
/// its store.
void check_rank_0_runs(const Environment& env);

/// Collective. Publishes `mine` and returns what all ranks publish, in a number of requests that does not
/// depend on the number of ranks, but for waiting. Throws CommError, on all ranks: some are missing when the
/// limit is reached or the launcher says that one has ended with exit code 0 (which), WORLD_SIZE or a setting
/// differs, one RANK is given to two processes.
std::vector<RankInfo> register_rank(const GroupStore& store, const Environment& env, const RankInfo& mine,
                                    WaitLimit& limit);

}  // namespace tessera::comm
