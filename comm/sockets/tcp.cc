#include "comm/sockets/tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Addresses resolve_numeric(const std::string& address, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0)
    throw CommError("'", address, " ", port, "' is no address and port of a rank");
  return Addresses(found, &freeaddrinfo);
}

FileDescriptor listen_at(int family, const sockaddr* address, socklen_t length, int kind) {
  FileDescriptor socket(::socket(family, kind | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  const int on = 1;
  const int off = 0;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (family == AF_INET6) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(socket.get(), address, length) != 0 || ::listen(socket.get(), 4096) != 0) {
    const int error = errno;
    socket.reset();
    errno = error;
  }
  return socket;
}

int port_in(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return -1;
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? port_in(address) : -1;
}

bool await_event(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd polled{fd, events, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

FileDescriptor connect_to(const addrinfo& address, Clock::time_point deadline) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || ::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return socket;
  int error = errno;
  if (error == EINPROGRESS || error == EINTR) {
    error = ETIMEDOUT;
    socklen_t length = sizeof error;
    if (await_event(socket.get(), POLLOUT, deadline))
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) return socket;
  socket.reset();
  errno = error;
  return {};
}

void keep_alive(int fd, std::chrono::seconds limit) {
  const int on = 1, idle_s = std::max(1, static_cast<int>(limit.count() / 4)), interval_s = 1,
            count = std::max(1, static_cast<int>(limit.count()) - idle_s);
  const auto limit_ms = static_cast<unsigned>(limit.count() * 1000);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
}

milliseconds time_without_answer(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  return milliseconds(std::min(info.tcpi_last_data_recv, info.tcpi_last_ack_recv));
}

void keep_open(int fd) {
  const int on = 1, idle_s = 300, interval_s = 60, count = 127;  // the most that the kernel takes
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

}  // namespace tessera::comm
