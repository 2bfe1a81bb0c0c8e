// CPU tensors of ranks that share memory: shared memory within a host ("shm" where that is all), Gloo between
// hosts ("hybrid").
//
// Ranks of a host need no common parent, user or mount, but one network namespace: they pass descriptors of
// memory over abstract Unix sockets (comm/control/peer_sockets.h). The first of them reserves the pages,
// which are charged to its control group. All ranks of a host may write to all of the memory, so a stray
// write on one rank changes it on all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/control/hosts.h"
#include "comm/control/peer_sockets.h"
#include "comm/gloo/gloo.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Says who shares memory with whom, as found out by sharing it.
struct FoundHosts {
  std::shared_ptr<const Hosts> hosts;
  std::shared_ptr<shm::PeerSockets> peers;  ///< the ranks of this host
  std::string obstacle;                     ///< why ranks that should can't share memory; empty: they do
};

/// Collective. `may_share`: by rank, equal words for ranks that are to try. They connect, map a segment that
/// the first of them has made, and each reads there what every other has written. Equal on all ranks, except
/// `peers`. Throws CommError: a rank has ended.
FoundHosts find_hosts(const GroupStore& store, int rank, const std::vector<std::string>& may_share,
                      std::chrono::milliseconds timeout);

/// Collective. Connects the ranks of each host, which find each other through `store`. `names`: by rank, what
/// messages call it. Throws CommError: ranks in different network namespaces, no descriptors.
FoundHosts connect_hosts(const GroupStore& store, std::shared_ptr<const Hosts> hosts, int rank,
                         const std::vector<int>& names, std::chrono::milliseconds timeout);

/// Collective. `found`: without an obstacle, and more ranks than hosts. `gloo`: rank and size are the whole
/// group's; on one host what is Gloo's own is not used. `on_failure` is called where a thread carries out the
/// collectives, on several hosts. Throws CommError: no shared memory.
std::unique_ptr<Transport> make_hybrid_transport(const GroupStore& store, const FoundHosts& found,
                                                 const GlooOptions& gloo, FailureHook on_failure);

}  // namespace tessera::comm
