// Shared memory for CPU tensors of ranks on one host.
#pragma once

#include <chrono>
#include <memory>

#include "comm/transport.h"

namespace tessera::comm {

/// Collective. Connects the ranks, which find each other through `store`, over Unix sockets. Throws
/// CommError: ranks in different network namespaces, no shared memory, no descriptors.
std::unique_ptr<Transport> make_shm_transport(const GroupStore& store, int rank, int size,
                                              std::chrono::milliseconds timeout,
                                              std::chrono::milliseconds connect_timeout);

}  // namespace tessera::comm
