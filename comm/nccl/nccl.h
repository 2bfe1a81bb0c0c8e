// NCCL for CUDA tensors, through libtorch's ProcessGroupNCCL, which lives in the CUDA plugin
// (core/cuda_plugin.h).
#pragma once

#include <chrono>
#include <memory>

#include "comm/transport.h"

namespace tessera::comm {

/// Collective. The ranks find each other through `store`. `device`: this rank's, which no other rank has.
std::unique_ptr<Transport> make_nccl_transport(const GroupStore& store, int rank, int size, int device,
                                               std::chrono::milliseconds timeout);

}  // namespace tessera::comm
