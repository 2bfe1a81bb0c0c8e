// The HostTransfer of a CUDA device: a stream for each direction, events, and memory that is page-locked.
#pragma once

#include <memory>

#include "comm/memory/host_transfer.h"

namespace tessera::comm {

/// `pin_memory`: host_memory() is page-locked, which copies beside the device's work need. Throws
/// Error when CUDA cannot be used.
std::shared_ptr<HostTransfer> make_cuda_host_transfer(at::Device device, bool pin_memory);

}  // namespace tessera::comm
