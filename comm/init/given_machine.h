// The seam of join() and run_threads() for tests: what they otherwise find out about the machine.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/init/init.h"
#include "comm/memory/host_transfer.h"

namespace tessera::comm {

/// Says what a test gives in place of the machine. A member that is not set stands for what the machine has.
/// The rank's thread calls the functions.
struct GivenMachine {
  /// The rank's host: ranks with different words share no memory. Ranks as threads with "hybrid" are
  /// otherwise on two hosts: the first half of them, and the others.
  std::function<std::string(int rank)> host = {};
  /// The device of the rank, whose memory is the host's: "staged" then moves CPU tensors.
  std::function<std::shared_ptr<HostTransfer>(int rank)> transfer = {};
};

/// Collective. See init.h.
CommunicatorPtr join(const JoinOptions& options, const Environment& env, const GivenMachine& given);
void run_threads(int world_size, const JoinOptions& options, const GivenMachine& given,
                 const std::function<void(CommunicatorPtr)>& body);

}  // namespace tessera::comm
