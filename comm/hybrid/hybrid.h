// CPU tensors of ranks on several hosts: shared memory within a host, Gloo between hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/control/peer_sockets.h"
#include "comm/gloo/gloo.h"
#include "comm/hybrid/hosts.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Says who shares memory with whom, as found out by sharing it.
struct FoundHosts {
  std::shared_ptr<const hybrid::Hosts> hosts;
  std::shared_ptr<shm::PeerSockets> peers;  ///< the ranks of this host
  std::string obstacle;                     ///< why ranks that should can't share memory; empty: they do
};

/// Collective. `may_share`: by rank, equal words for ranks that are to try. They connect, map a segment that
/// the first of them has made, and each reads there what every other has written. Equal on all ranks, except
/// `peers`. Throws CommError: a rank has ended.
FoundHosts find_hosts(const GroupStore& store, int rank, const std::vector<std::string>& may_share,
                      std::chrono::milliseconds timeout);

/// Collective. `found`: at least two hosts, without an obstacle. `gloo`: rank and size are the whole group's.
std::unique_ptr<Transport> make_hybrid_transport(const GroupStore& store, const FoundHosts& found,
                                                 const GlooOptions& gloo, FailureHook on_failure);

}  // namespace tessera::comm
