// Calls on one socket, with a deadline, and messages for their errors.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>

#include "core/files/file_descriptor.h"

namespace tessera::comm {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Takes an address and a port in numbers. Throws CommError.
Addresses resolve_numeric(const std::string& address, const std::string& port);
/// None, with errno, when it cannot be. The kernel completes connections before they are accepted. `kind`:
/// SOCK_STREAM, SOCK_SEQPACKET.
FileDescriptor listen_at(int family, const sockaddr* address, socklen_t length, int kind = SOCK_STREAM);
/// Requires: the socket is bound.
int port_of(int fd);
/// -1: not TCP.
int port_in(const sockaddr_storage& address);
/// True when one of poll()'s events came before the deadline.
bool await_event(int fd, short events, std::chrono::steady_clock::time_point deadline);
/// None, with errno, when there is no connection by then.
FileDescriptor connect_to(const addrinfo& address, std::chrono::steady_clock::time_point deadline);
/// Makes the kernel close the connection when the other host's kernel has not answered for `limit`,
/// and not sooner. Once nothing has come for a quarter of `limit`, the kernel asks every second, and one
/// answer is enough. So lost packets do not close it: of the 15 questions in 20 s all would have to be lost,
/// or their answers. What is sent and not acknowledged is sent again at short intervals at first
/// (TCP_THIN_LINEAR_TIMEOUTS), and not at doubling ones only, for the same reason.
void keep_alive(int fd, std::chrono::seconds limit);
/// Returns for how long nothing has come over the connection, acknowledgements included.
std::chrono::milliseconds time_without_answer(int fd);
/// Makes the kernel send a packet every 5 min over an idle connection, so that a firewall between the
/// hosts does not forget it. It does not find out that a host is gone.
void keep_open(int fd);

}  // namespace tessera::comm
