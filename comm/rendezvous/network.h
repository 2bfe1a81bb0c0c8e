// The socket calls around the rendezvous that c10d does not make, or makes without a limit or a clear error.
#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <string>

namespace tessera::comm {

/// "localhost", 127.x.x.x, ::1.
bool is_loopback(const std::string& host);

/// A listening socket for the store (close-on-exec): at `host` alone if that is a loopback name or has
/// one address, which is this host's; else on all interfaces. Throws CommError in one line when the port is
/// taken. The caller owns the descriptor.
int listen_for_store(const std::string& host, int port);

/// Throws CommError when this process, which listens at host:port, cannot connect there: then its
/// clients could not either.
void check_reachable(const std::string& host, int port);

/// Waits until a c10d store answers at host:port; calls `still_waiting` about once a second with what
/// is there instead. Throws CommError when none answers in time, another program does, or the name is
/// unknown.
void await_server(const std::string& host, int port, std::chrono::milliseconds timeout,
                  const std::function<void(const std::string& instead)>& still_waiting);

/// The descriptors of this process's connections to `port`, the program's own among them. (c10d does not
/// expose its client's socket: it is what is new once the client is there.)
std::set<int> connections_to(int port);

/// Limits how long these connections wait for an answer, and makes the kernel close them when the other host
/// is gone. (c10d waits without a limit.)
void limit_waits(const std::set<int>& connections, std::chrono::milliseconds timeout);

/// This machine's address on the route to `host`. Throws CommError when there is none.
std::string address_towards(const std::string& host, int port);

/// The address of a network interface of this host. Throws CommError, naming the environment variable
/// that named it, when there is none.
std::string address_of_interface(const std::string& name, const std::string& variable);

/// Equal for two processes exactly when they reach each other over the loopback interface: same boot
/// of the same machine, same network namespace.
std::string loopback_domain();

/// "host:port", brackets around an IPv6 address.
std::string endpoint(const std::string& host, int port);

}  // namespace tessera::comm
