// HostDevice: a Device whose memory is the host's and whose streams are threads. Tests run the protocol of
// p2p over it, between threads and between processes, where there is no GPU.
#pragma once

#include <chrono>
#include <memory>

#include "comm/p2p/device.h"

namespace tessera::comm::p2p {

struct HostDeviceOptions {
  /// A stream takes up to this long before each of its steps, so that ranks differ; 0: none.
  std::chrono::microseconds lag{0};
  int64_t half_mailbox_bytes = 256 << 10;
};

/// Its "current stream" is the calling thread, which carries out what it is given at once.
std::shared_ptr<Device> make_host_device(const HostDeviceOptions& options = {});

}  // namespace tessera::comm::p2p
