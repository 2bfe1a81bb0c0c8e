#include "launcher/environment/port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

/// A socket bound to `port` on every address, or errno in `error`.
FileDescriptor bind_any(int family, int port, int* error) {
  FileDescriptor fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1, off = 0;
  int rc = fd ? 0 : -1;
  if (rc == 0) rc = ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (family == AF_INET6) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<uint16_t>(port));
    address.sin6_addr = in6addr_any;
    if (rc == 0) rc = ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (rc == 0) rc = ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  } else {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    if (rc == 0) rc = ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  }
  *error = rc == 0 ? 0 : errno;
  return rc == 0 ? std::move(fd) : FileDescriptor();
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

}  // namespace

PortReservation::PortReservation(int port) {
  int error = 0;
  socket_ = bind_any(AF_INET6, port, &error);
  if (!socket_ && error != EADDRINUSE && error != EACCES)
    socket_ = bind_any(AF_INET, port, &error);  // no IPv6 on this host
  if (!socket_)
    throw CommError(port == 0
                        ? str("no port can be bound on this host: ", std::strerror(error))
                        : str("port ", port, " cannot be used for the rendezvous: ", std::strerror(error),
                              "; choose another with --master-port, or leave it out for a free one"));
  port_ = port_of(socket_.get());
}

}  // namespace tessera::launcher
