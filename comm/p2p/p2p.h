// Memory of each other, for CUDA tensors of ranks on one host; several ranks may share a device.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/p2p/device.h"
#include "comm/transport.h"

namespace tessera::comm {

struct P2pOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};          ///< of a collective
  std::chrono::milliseconds connect_timeout{0};  ///< of connecting to all ranks
  std::shared_ptr<p2p::Device> device;           ///< p2p/cuda_device.h; for tests p2p/host_device.h
  std::vector<int> numbers = {};  ///< what messages call the ranks, where they are some of many; empty: 0 …
  uint64_t first_number = 1;      ///< of an operation; for tests
};

/// Collective. Connects the ranks, which find each other through `store`, over Unix sockets, and maps a
/// mailbox of each rank on all. Throws CommError: ranks in different network namespaces, no device memory, a
/// rank cannot map another's.
std::unique_ptr<Transport> make_p2p_transport(const GroupStore& store, const P2pOptions& options,
                                              FailureHook on_failure);

/// Collective. Tries it: makes such a transport, and gathers and sums small buffers over it. Why this rank
/// failed; empty: it did not. The others may have.
std::string obstacle_to_p2p(const GroupStore& store, const P2pOptions& options);

}  // namespace tessera::comm
