#include "tests/comm/run_ranks.h"

#include <gtest/gtest.h>

#include <memory>

namespace tessera::comm::testing {

GivenMachine with_host_devices(HostOnlyTransfer::Mode mode) {
  return {.transfer = [mode](int rank) {
    return std::shared_ptr<HostTransfer>(new HostOnlyTransfer(mode), [rank](HostOnlyTransfer* device) {
      for (const std::string& violation : device->violations())
        ADD_FAILURE() << "rank " << rank << ": " << violation;
      delete device;
    });
  }};
}

void run_ranks(int world_size, const JoinOptions& options, const std::function<void(CommunicatorPtr)>& body) {
  run_threads(world_size, options, options.backend == "staged" ? with_host_devices() : GivenMachine{}, body);
}

}  // namespace tessera::comm::testing
