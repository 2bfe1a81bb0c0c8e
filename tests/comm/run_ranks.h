// Ranks as threads on every backend, "staged" included: the device is then host memory.
#pragma once

#include <functional>

#include "comm/init/given_machine.h"
#include "tests/comm/memory/host_only_transfer.h"

namespace tessera::comm::testing {

/// A machine whose ranks have devices that are host memory. What breaks the rules of copies is a failure of
/// the test, once the device is gone.
GivenMachine with_host_devices(HostOnlyTransfer::Mode mode = HostOnlyTransfer::Mode::kOnThreads);

/// run_threads(). Ranks over "staged" have a device that is host memory.
void run_ranks(int world_size, const JoinOptions& options, const std::function<void(CommunicatorPtr)>& body);

}  // namespace tessera::comm::testing
