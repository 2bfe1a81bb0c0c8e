#include "comm/network.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "core/error.h"
#include "core/file_descriptor.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, int port, int socket_type, const char* variable) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = socket_type;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    throw CommError(
        str(variable, "=", host, " is no known host name or address (", gai_strerror(status), ")"));
  }
  return Addresses(found, &freeaddrinfo);
}

[[noreturn]] void cannot_listen(const std::string& host, int port, int error) {
  if (error == EADDRINUSE) {
    throw CommError(
        str("the port of ", endpoint(host, port),
            " is in use: rank 0 cannot serve the rendezvous there; set MASTER_PORT to a free port"));
  }
  throw CommError(
      str("rank 0 cannot serve the rendezvous at ", endpoint(host, port), " (", std::strerror(error), ")"));
}

int bind_and_listen(int family, const sockaddr* address, socklen_t length) {
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return -1;
  const int on = 1;
  const int off = 0;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (family == AF_INET6) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(socket.get(), address, length) != 0 || ::listen(socket.get(), 1024) != 0) return -1;
  return socket.release();
}

/// True when the connection was made; the error is left in errno otherwise.
bool try_connect(const addrinfo& address) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return socket && ::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0;
}

}  // namespace

bool is_loopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  return host == "localhost" || host == "::1";
}

std::string endpoint(const std::string& host, int port) {
  return host.find(':') == host.npos ? str(host, ":", port) : str("[", host, "]:", port);
}

int listen_for_store(const std::string& host, int port) {
  int fd = -1;
  if (is_loopback(host)) {
    const Addresses addresses = resolve(host, port, SOCK_STREAM, "MASTER_ADDR");
    fd = bind_and_listen(addresses->ai_family, addresses->ai_addr, addresses->ai_addrlen);
  } else {
    sockaddr_in6 any6{};
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons(static_cast<uint16_t>(port));
    fd = bind_and_listen(AF_INET6, reinterpret_cast<const sockaddr*>(&any6), sizeof any6);
    if (fd < 0 && errno != EADDRINUSE && errno != EACCES) {  // a kernel without IPv6
      sockaddr_in any4{};
      any4.sin_family = AF_INET;
      any4.sin_port = htons(static_cast<uint16_t>(port));
      fd = bind_and_listen(AF_INET, reinterpret_cast<const sockaddr*>(&any4), sizeof any4);
    }
  }
  if (fd < 0) cannot_listen(host, port, errno);
  return fd;
}

void check_listening(int fd) {
  int listening = 0;
  socklen_t length = sizeof listening;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || listening == 0) {
    throw CommError(str("TESSERA_STORE_FD=", fd, " is not a listening socket"));
  }
}

void await_server(const std::string& host, int port, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::milliseconds interval{5};
  while (true) {
    const Addresses addresses = resolve(host, port, SOCK_STREAM, "MASTER_ADDR");
    int error = 0;
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      if (try_connect(*address)) return;
      error = errno;
    }
    if (std::chrono::steady_clock::now() + interval > deadline) {
      throw CommError(str("nobody serves the rendezvous at ", endpoint(host, port), " (",
                          std::strerror(error),
                          "): rank 0 has not arrived, or MASTER_ADDR and MASTER_PORT point elsewhere"));
    }
    std::this_thread::sleep_for(interval);
    interval = std::min(interval * 2, std::chrono::milliseconds(200));
  }
}

std::string address_towards(const std::string& host, int port) {
  const Addresses addresses = resolve(host, port, SOCK_DGRAM, "MASTER_ADDR");
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    // Connecting a datagram socket sends nothing; it only looks up the route.
    FileDescriptor socket(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    if (!socket || ::connect(socket.get(), address->ai_addr, address->ai_addrlen) != 0 ||
        getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0) {
      continue;
    }
    char text[NI_MAXHOST] = {};
    if (getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      return text;
    }
  }
  throw CommError(str("there is no route to MASTER_ADDR=", host));
}

std::string loopback_domain() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat net_namespace {};
  const bool known = ::stat("/proc/self/ns/net", &net_namespace) == 0;
  return str(boot, "/", known ? net_namespace.st_ino : 0);
}

}  // namespace tessera::comm
