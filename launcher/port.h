// PortReservation: the port of the ranks' rendezvous (MASTER_PORT), held while they run.
#pragma once

#include "core/file_descriptor.h"

namespace tessera::launcher {

// [Note: the port is bound, never listened on]
// Picking a free port, closing it and hoping that rank 0 gets it first is a race, which other programs on a
// busy host do win. So the launcher keeps the port bound for as long as the ranks run. Linux lets a
// second socket bind and listen on it when both have SO_REUSEADDR and the first is not listening: rank 0's
// store (c10d's TCPStore sets the option, as servers do) takes the port as if it were free, while the
// kernel gives it neither to a bind(0) nor to an outgoing connection of anybody else. Handing rank 0 a
// listening socket instead would need a store that takes one, which `tessera launch python train.py` has not.

/// Owns the bound socket. Move-only.
class PortReservation {
 public:
  /// Local. Reserves `port` on all addresses of this host, 0: any free one. Throws CommError when
  /// it is in use or not ours to take.
  explicit PortReservation(int port);
  int port() const { return port_; }

 private:
  FileDescriptor socket_;
  int port_ = 0;
};

}  // namespace tessera::launcher
