#include "comm/rendezvous/network.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include "comm/control/error_message.h"
#include "comm/control/liveness.h"
#include "comm/sockets/tcp.h"
#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// How long one attempt to connect may take, and how often a wait says what it waits for.
constexpr milliseconds kAttemptTime{1000};

Addresses resolve(const std::string& host, int port, int socket_type, const char* variable) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = socket_type;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    throw CommError(variable, "=", host, " is no known host name or address (", gai_strerror(status), ")");
  }
  return Addresses(found, &freeaddrinfo);
}

[[noreturn]] void cannot_listen(const std::string& host, int port, int error) {
  if (error == EADDRINUSE) {
    throw CommError("the port of ", endpoint(host, port),
                    " is in use: rank 0 cannot serve the rendezvous there; set MASTER_PORT to a free port");
  }
  throw CommError("rank 0 cannot serve the rendezvous at ", endpoint(host, port), " (", std::strerror(error),
                  ")");
}

/// A connection to any of the host's addresses; none, with errno.
FileDescriptor connect_to_any(const addrinfo* addresses, Clock::time_point deadline) {
  int error = ETIMEDOUT;
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    if (FileDescriptor socket = connect_to(*address, std::min(deadline, Clock::now() + kAttemptTime)))
      return socket;
    error = errno;
  }
  errno = error;
  return {};
}

/// This process or host has run out of something: waiting for the server does not help.
bool is_local_shortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

/// One that ranks on other hosts see too. (A host's own name often is 127.0.1.1 to itself.)
bool names_one_address(const addrinfo& found) {
  std::array<char, NI_MAXHOST> text{};
  return found.ai_next == nullptr &&
         getnameinfo(found.ai_addr, found.ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) ==
             0 &&
         !is_loopback(text.data());
}

int listen_on_all(const std::string& host, int port) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  FileDescriptor fd = listen_at(AF_INET6, reinterpret_cast<const sockaddr*>(&any6), sizeof any6);
  if (!fd && errno != EADDRINUSE && errno != EACCES) {  // a kernel without IPv6
    sockaddr_in any4{};
    any4.sin_family = AF_INET;
    any4.sin_port = htons(static_cast<uint16_t>(port));
    fd = listen_at(AF_INET, reinterpret_cast<const sockaddr*>(&any4), sizeof any4);
  }
  if (!fd) cannot_listen(host, port, errno);
  return fd.release();
}

enum class Reply { kStore, kOther, kClosed, kNone };

/// What a TCPStore's client sends first; the server answers with the nonce. (A TCPStore waits for that
/// without a limit.) The numbers are those of c10d's TCPStoreBackend.hpp, whose place is not the same in all
/// versions of torch.
struct [[gnu::packed]] StoreGreeting {
  uint8_t validate = 0;
  uint32_t magic = 0x3C85F7CE;
  uint8_t ping = 13;
  uint32_t nonce = 0x7E55E3A0;
};

Reply read_reply(int fd, Clock::time_point deadline) {
  uint32_t nonce = 0;
  while (await_event(fd, POLLIN, deadline)) {
    const ssize_t count = ::recv(fd, &nonce, sizeof nonce, MSG_PEEK);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count <= 0) return Reply::kClosed;
    const uint32_t expected = StoreGreeting().nonce;
    if (std::memcmp(&nonce, &expected, static_cast<size_t>(count)) != 0) return Reply::kOther;
    if (count == sizeof nonce) return Reply::kStore;
    std::this_thread::sleep_for(milliseconds(1));  // the rest of it
  }
  return Reply::kNone;
}

Reply ask_for_store(int fd, Clock::time_point deadline) {
  const StoreGreeting greeting;
  if (::send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting) return Reply::kClosed;
  return read_reply(fd, deadline);
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
  const Addresses addresses = resolve(host, port, SOCK_STREAM, "MASTER_ADDR");
  if (is_loopback(host) || names_one_address(*addresses)) {
    FileDescriptor fd = listen_at(addresses->ai_family, addresses->ai_addr, addresses->ai_addrlen);
    if (fd) return fd.release();
    if (is_loopback(host) || errno == EADDRINUSE) cannot_listen(host, port, errno);
  }
  return listen_on_all(host, port);
}

void check_reachable(const std::string& host, int port) {
  const Addresses addresses = resolve(host, port, SOCK_STREAM, "MASTER_ADDR");
  if (connect_to_any(addresses.get(), Clock::now() + 5 * kAttemptTime)) return;
  throw CommError("rank 0 cannot connect to its own server of the rendezvous at ", endpoint(host, port), " (",
                  describe_errno(errno), errno == ENETUNREACH ? "): is the loopback interface up?" : ")");
}

void await_server(const std::string& host, int port, milliseconds timeout,
                  const std::function<void(const std::string& instead)>& still_waiting) {
  const auto deadline = Clock::now() + timeout;
  const std::string where = endpoint(host, port);
  milliseconds pause{5};
  while (true) {
    const Addresses addresses = resolve(host, port, SOCK_STREAM, "MASTER_ADDR");
    const FileDescriptor server = connect_to_any(addresses.get(), deadline);
    const int error = errno;
    if (!server && is_local_shortage(error))
      throw CommError("no connection to the rendezvous at ", where, ": ", describe_errno(error));
    std::string instead = describe_errno(error);
    for (bool is_first = true; server; is_first = false) {
      // Rank 0 may listen already and serve later; it then answers the greeting that was sent first.
      const Reply reply = is_first
                              ? ask_for_store(server.get(), std::min(deadline, Clock::now() + kAttemptTime))
                              : read_reply(server.get(), std::min(deadline, Clock::now() + kAttemptTime));
      if (reply == Reply::kStore) return;
      if (reply == Reply::kOther)
        throw CommError("what answers at ", where,
                        " is not the rendezvous: another program has that port; MASTER_ADDR and MASTER_PORT "
                        "are to be those of rank 0");
      instead = reply == Reply::kNone ? "something accepts connections, but does not answer"
                                      : "something closes connections unanswered";
      if (reply == Reply::kClosed || Clock::now() >= deadline) break;
      still_waiting(instead);
    }
    if (Clock::now() + pause > deadline) {
      throw CommError("nobody serves the rendezvous at ", where, " (", instead, "; waited ",
                      name_duration(timeout),
                      "): rank 0 has not arrived, or MASTER_ADDR and MASTER_PORT point elsewhere");
    }
    still_waiting(instead);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(200));
  }
}

std::set<int> connections_to(int port) {
  std::set<int> connections;
  const std::unique_ptr<DIR, int (*)(DIR*)> descriptors(::opendir("/proc/self/fd"), &::closedir);
  while (const dirent* entry = descriptors ? ::readdir(descriptors.get()) : nullptr) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && port_in(peer) == port)
      connections.insert(fd);
  }
  return connections;
}

void limit_waits(const std::set<int>& connections, milliseconds timeout) {
  const timeval limit{timeout.count() / 1000, timeout.count() % 1000 * 1000};
  for (const int fd : connections) {
    for (const int direction : {SO_RCVTIMEO, SO_SNDTIMEO})
      setsockopt(fd, SOL_SOCKET, direction, &limit, sizeof limit);
    keep_alive(fd, kHostTimeout);
  }
}

namespace {

bool loopback_is_up() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next)
    if ((one->ifa_flags & IFF_LOOPBACK) != 0 && (one->ifa_flags & IFF_UP) != 0) return true;
  return false;
}

}  // namespace

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
  throw CommError("there is no route to MASTER_ADDR=", host,
                  !is_loopback(host) ? ""
                  : loopback_is_up() ? ": the loopback interface is up, but has no such address"
                                     : ": the loopback interface is down");
}

std::string address_of_interface(const std::string& name, const std::string& variable) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0)
    throw CommError("the network interfaces of this host cannot be listed: ", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
      if (name != one->ifa_name || one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
      char text[NI_MAXHOST] = {};
      const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      if (getnameinfo(one->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) return text;
    }
  }
  throw CommError(variable,
                  if_nametoindex(name.c_str()) == 0 ? ": this host has no network interface '"
                                                    : ": no address on the network interface '",
                  name, "'");
}

std::string loopback_domain() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat net_namespace{};
  const bool known = ::stat("/proc/self/ns/net", &net_namespace) == 0;
  return str(boot, "/", known ? net_namespace.st_ino : 0);
}

}  // namespace tessera::comm
