// The meeting of all ranks at the store, before any backend exists: who is there, and does everyone mean the
// same group.
#pragma once

#include <chrono>

#include "comm/group_store.h"
#include "comm/init.h"

namespace tessera::comm {

struct Meeting {
  GroupStore store;       ///< the group's own part of it
  bool serves = false;    ///< this process runs the server
  bool one_host = false;  ///< all ranks reach each other over the loopback interface
};

/// Collective. Rank 0 serves the store (torchrun's agent, with env.agent_store), everyone else connects.
/// Throws CommError: port in use, nobody serving, ranks missing (which), WORLD_SIZE differing, one RANK given
/// twice.
Meeting meet(const Environment& env, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
