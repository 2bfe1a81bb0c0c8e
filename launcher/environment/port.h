// PortReservation: reserves the port of the ranks' rendezvous (MASTER_PORT) while they run.
#pragma once

#include "core/files/file_descriptor.h"

namespace tessera::launcher {

// The port is bound, never listened on.
// Finding a free port, closing it and letting rank 0 bind it is a race that other programs on a busy host can
// win. So the launcher keeps the port bound while the ranks run. Linux lets a second socket bind and listen
// on it if both have SO_REUSEADDR and the first is not listening. So rank 0's store (c10d's TCPStore sets the
// option) can use the port, while the kernel gives it to no other bind(0) or outgoing connection. Passing a
// listening socket to rank 0 instead would need a store that accepts one, which a program such as
// `tessera launch python train.py` does not have.

/// Keeps a port until the ranks have started. Owns the bound socket. Move-only.
class PortReservation {
 public:
  /// Reserves `port` on all addresses of this host; 0: any free port. Throws CommError if it is in use
  /// or not permitted.
  explicit PortReservation(int port);
  int port() const { return port_; }

 private:
  FileDescriptor socket_;
  int port_ = 0;
};

}  // namespace tessera::launcher
