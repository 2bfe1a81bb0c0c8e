// Shared memory for CPU tensors of ranks on one host.
//
// Ranks need no common parent, user or mount, but one network namespace: they pass descriptors of memory over
// abstract Unix sockets (comm/control/peer_sockets.h). Rank 0 reserves the pages, which are charged to its
// control group. All ranks may write to all of the memory, so a stray write on one rank changes it on all.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

struct ShmOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};          ///< of a collective
  std::chrono::milliseconds connect_timeout{0};  ///< of connecting to all ranks
  std::vector<int> numbers = {};  ///< what messages call the ranks, where they are some of many; empty: 0 …
};

/// Collective. Connects the ranks, which find each other through `store`, over Unix sockets. Throws
/// CommError: ranks in different network namespaces, no shared memory, no descriptors.
std::unique_ptr<Transport> make_shm_transport(const GroupStore& store, const ShmOptions& options);

}  // namespace tessera::comm
