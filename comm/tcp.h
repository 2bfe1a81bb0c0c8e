// One TCP socket at a time: calls with a deadline, and words for what went wrong.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>

#include "core/file_descriptor.h"

namespace tessera::comm {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Local. Of an address and a port in numbers. Throws CommError.
Addresses resolve_numeric(const std::string& address, const std::string& port);
/// Local. None, with errno, when it cannot be. Connections are completed by the
/// kernel before anybody accepts them.
FileDescriptor listen_at(int family, const sockaddr* address, socklen_t length);
/// Local. Of a socket that is bound.
int port_of(int fd);
/// Local. -1: not TCP.
int port_in(const sockaddr_storage& address);
/// Local. Whether one of poll()'s events came before the deadline.
bool await_event(int fd, short events, std::chrono::steady_clock::time_point deadline);
/// Local. None, with errno, when nobody has accepted by then.
FileDescriptor connect_to(const addrinfo& address, std::chrono::steady_clock::time_point deadline);
/// Local. In words; of a limit of this process what it is.
std::string why_not_connected(int error);
/// Local. The kernel closes the connection when the other side's has not answered for `limit`.
void keep_alive(int fd, std::chrono::seconds limit);

}  // namespace tessera::comm
