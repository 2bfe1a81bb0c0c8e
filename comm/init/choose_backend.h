// What carries a group's collectives, which the ranks decide together once they have met.
#pragma once

#include <memory>
#include <string>

#include "comm/hybrid/hybrid.h"
#include "comm/join_options.h"
#include "comm/memory/host_transfer.h"
#include "comm/rendezvous/rendezvous.h"

namespace tessera::comm {

/// Says what carries the collectives. Equal on all ranks, but for `found` and `transfer`.
struct Choice {
  std::string backend;                               ///< "shm", "hybrid", "gloo" or "nccl"
  FoundHosts found = {};                             ///< for "hybrid"
  std::shared_ptr<HostTransfer> transfer = nullptr;  ///< set: "staged", over that backend
};

/// Collective. For tensors on `device`. `transfer`: of the device for "staged"; null: the CUDA device's.
/// Throws CommError: the backend that JoinOptions names cannot be used, or two ranks have one device that
/// NCCL does not share.
Choice choose_backend(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                      at::Device device, std::shared_ptr<HostTransfer> transfer);

}  // namespace tessera::comm
