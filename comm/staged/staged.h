// The staged transport: tensors of a device pass through page-locked memory of the host, and over any
// transport of CPU tensors. Ranks may share a device. Sums have the bits of that transport.
//
// [Note: staged collectives]
// A group has one thread. It carries out the group's collectives one after another, in the order in which
// they were issued, which is the same on all ranks. First it waits until the stream that was current when the
// collective was issued has got there, and copies what this rank gives to the host. Then the transport of CPU
// tensors carries out the collective in the host's memory. Last the result is copied to the device; the
// collective has ended when it is there, and Work::wait blocks until then.
// So a rank's collectives wait for nothing but other ranks' and for the rank's own device, whose streams
// never wait for another rank: groups need no common order, as over CPU transports. A group has one buffer of
// the host's memory, as large as its largest collective so far.
#pragma once

#include <memory>

#include "comm/memory/host_transfer.h"
#include "comm/transport.h"

namespace tessera::comm {

/// `host`: a transport of CPU tensors, in which this rank is `rank`. `transfer`: of `device`.
/// `on_failure` is called on the group's thread.
std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> host, int rank, at::Device device,
                                                 std::shared_ptr<HostTransfer> transfer,
                                                 FailureHook on_failure);

}  // namespace tessera::comm
