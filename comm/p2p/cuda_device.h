// CUDA as a Device: memory of the virtual memory management, which file descriptors hand to other processes,
// and stream memory operations on the host's memory. Lives in the CUDA plugin (core/cuda_plugin.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/p2p/device.h"

namespace tessera::comm::p2p {

/// `index`: as this process numbers its devices.
std::shared_ptr<Device> make_cuda_device(int index);

/// 16 bytes that no other device has, whichever process sees it.
std::string cuda_uuid(int index);

/// Why device `index` cannot be used by backend "p2p" with the devices of `uuids`; empty: nothing is
/// known that prevents it. A device that this process does not see may be mapped or not.
std::string obstacle_on_cuda(int index, const std::vector<std::string>& uuids);

}  // namespace tessera::comm::p2p
