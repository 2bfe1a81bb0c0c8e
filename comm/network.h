// The few socket calls around the rendezvous that c10d does not make, or makes without a clear error.
#pragma once

#include <chrono>
#include <string>

namespace tessera::comm {

/// Local. "localhost", 127.x.x.x, ::1.
bool is_loopback(const std::string& host);

/// Local. A listening socket for the store (close-on-exec): on the loopback interface if `host` is a loopback
/// name, else on all. Throws CommError in one line when the port is taken. The caller owns the descriptor.
int listen_for_store(const std::string& host, int port);

/// Local. Throws CommError unless `fd` is a listening socket (TESSERA_STORE_FD).
void check_listening(int fd);

/// Local. Waits until somebody accepts connections at host:port. Throws CommError when nobody does in time,
/// or the name is unknown.
void await_server(const std::string& host, int port, std::chrono::milliseconds timeout);

/// Local. This machine's address on the route to `host`. Throws CommError when there is none.
std::string address_towards(const std::string& host, int port);

/// Local. Equal for two processes exactly when they reach each other over the loopback interface: same boot
/// of the same machine, same network namespace.
std::string loopback_domain();

/// Local. "host:port", brackets around an IPv6 address.
std::string endpoint(const std::string& host, int port);

}  // namespace tessera::comm
