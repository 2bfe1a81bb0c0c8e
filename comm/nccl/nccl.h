// NCCL for CUDA tensors, through libtorch's ProcessGroupNCCL, which lives in the CUDA plugin
// (core/cuda_plugin.h).
#pragma once

#include <chrono>
#include <memory>

#include "comm/join_options.h"
#include "comm/transport.h"
#include "core/environment/environment.h"

namespace tessera::comm {

/// Collective. The ranks find each other through `store`. `device`: this rank's, which no other rank has.
std::unique_ptr<Transport> make_nccl_transport(const GroupStore& store, const Environment& env, int device,
                                               std::chrono::milliseconds timeout);

}  // namespace tessera::comm
