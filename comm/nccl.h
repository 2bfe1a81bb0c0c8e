// NCCL for CUDA tensors, through libtorch's ProcessGroupNCCL, which lives in the CUDA plugin
// (core/cuda_plugin.h).
#pragma once

#include <chrono>
#include <memory>

#include "comm/init.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Local. Loads the plugin. Throws Error when there is no CUDA, or fewer devices than this host has ranks
/// (NCCL refuses two ranks on one device).
void check_cuda(int local_world_size);
/// Local. Makes it the current CUDA device.
void set_cuda_device(int device);

/// Collective. The ranks find each other through `store`.
std::unique_ptr<Transport> make_nccl_transport(const GroupStore& store, const Environment& env,
                                               std::chrono::milliseconds timeout);

}  // namespace tessera::comm
