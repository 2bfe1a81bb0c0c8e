// What carries a group's collectives, which the ranks decide together once they have met.
#pragma once

#include <memory>
#include <string>

#include "comm/hybrid/hybrid.h"
#include "comm/join_options.h"
#include "comm/p2p/device.h"
#include "comm/rendezvous/rendezvous.h"

namespace tessera::comm {

struct Choice {
  std::string backend;                  ///< "shm", "hybrid", "gloo", "nccl" or "p2p"
  FoundHosts found;                     ///< for "hybrid"
  std::shared_ptr<p2p::Device> device;  ///< for "p2p"
};

/// Collective. For tensors on `device`. Throws CommError: the backend that JoinOptions names cannot be used,
/// or two ranks have one device that NCCL does not share.
Choice choose_backend(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                      at::Device device);

}  // namespace tessera::comm
