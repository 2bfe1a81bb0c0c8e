// The rendezvous of all ranks at the store, before any backend exists: which ranks are there, whether all
// mean the same group, and connections by which each will notice that another's process has ended.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "comm/control/group_store.h"
#include "comm/join_options.h"
#include "comm/rendezvous/registration.h"
#include "core/environment/environment.h"

namespace tessera::comm {

/// Has what a rank knows once all have met.
struct Rendezvous {
  GroupStore store;           ///< the group's own part of it; its waits notice ranks that have ended
  bool serves_store = false;  ///< this process runs the server
  bool one_host = false;      ///< all ranks reach each other over the loopback interface
  /// Has a text by rank, which is equal for ranks that may share memory.
  std::vector<std::string> may_share = {};
};

/// The setting that rendezvous() adds. One that is given stands, as if by another release.
inline constexpr const char* kVersionSetting = "the version of what ranks say to each other";

/// Returns the settings of a group, named as in a run's configuration.
Settings settings_of(const JoinOptions& options, at::Device device);

/// Collective. Rank 0 serves the store (torchrun's agent, with env.agent_store), all others connect. All of
/// it takes no longer than options.rendezvous_timeout, unless options.interrupt throws; what it waits for
/// after 5 s, and then every minute, goes to options.log.
/// Throws CommError: port in use, no server or another program's, ranks missing (which), WORLD_SIZE or a
/// setting differing, one RANK given twice, a rank that has ended or cannot be reached.
/// `host`: not empty: ranks with different words share no memory (comm/init/given_machine.h).
Rendezvous rendezvous(const Environment& env, const JoinOptions& options, const Settings& settings,
                      const std::string& host = "");

}  // namespace tessera::comm
