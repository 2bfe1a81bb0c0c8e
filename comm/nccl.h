// NCCL for CUDA tensors, through libtorch's ProcessGroupNCCL, which lives in the CUDA plugin
// (core/cuda_plugin.h).
#pragma once

#include <chrono>
#include <memory>

#include "comm/init.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Local. Loads the plugin and makes `local_rank` the current CUDA device. Throws Error when there is no
/// CUDA, CommError when the host has fewer devices than ranks (NCCL refuses two ranks on one device).
void prepare_cuda(int local_rank, int local_world_size);

/// Collective. The ranks meet under `store` at the first collective. prepare_cuda() must have been called.
std::unique_ptr<Transport> make_nccl_transport(const GroupStore& store, const Environment& env,
                                               std::chrono::milliseconds timeout);

}  // namespace tessera::comm
