// The meeting of all ranks at the store, before any backend exists: who is there, does everyone mean the
// same group, and how each will notice that another's process has ended.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "comm/group_store.h"
#include "comm/init.h"

namespace tessera::comm {

struct Meeting {
  GroupStore store;       ///< the group's own part of it; its waits notice ranks that have ended
  bool serves = false;    ///< this process runs the server
  bool one_host = false;  ///< all ranks reach each other over the loopback interface
};

/// What must be equal on all ranks: names and values.
using Terms = std::vector<std::pair<std::string, std::string>>;

/// Local. In the words of a run's configuration.
Terms terms_of(const Options& options);

/// Collective. Rank 0 serves the store (torchrun's agent, with env.agent_store), everyone else connects. All
/// of it takes no longer than `timeout`; what it waits for after 5 s, and then every minute, goes to `log`.
/// Throws CommError: port in use, nobody or somebody else serving, ranks missing (which), WORLD_SIZE or a
/// term differing, one RANK given twice, a rank that has ended or cannot be reached.
Meeting meet(const Environment& env, std::chrono::milliseconds timeout, const Terms& terms,
             const Logger& log);

}  // namespace tessera::comm
