#include "comm/control/peer_sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/liveness.h"
#include "comm/sockets/tcp.h"
#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/random_digits.h"
#include "core/str.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kTokenLength = 32;

/// What a rank has written to the store.
void check_token(const std::string& token, const std::string& key) {
  if (token.size() != kTokenLength)
    throw CommError("the store has ", token.size(), " bytes as ", key, ", not ", kTokenLength);
}

/// A name that begins with NUL lives in the kernel's table only.
SocketAddress address_of(const std::string& token) {
  SocketAddress result;
  auto& address = reinterpret_cast<sockaddr_un&>(result.address);
  address.sun_family = AF_UNIX;
  const std::string name = "tessera-" + token;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  result.kind = SOCK_SEQPACKET;
  return result;
}

/// Has what travels: a number, and whether a descriptor travels with it.
struct Message {
  int64_t number;
  int64_t has_fd;
};

constexpr milliseconds kWatchInterval{20};

}  // namespace

PeerSockets::PeerSockets(const GroupStore& store, int rank, std::vector<int> numbers, milliseconds timeout)
    : rank_(rank), numbers_(std::move(numbers)), sockets_(numbers_.size()) {
  const std::string name = random_digits(kTokenLength / 2);  // every program on this host can see it
  const SocketAddress address = address_of(name);
  FileDescriptor listener =
      listen_at(AF_UNIX, reinterpret_cast<const sockaddr*>(&address.address), address.length, address.kind);
  if (!listener)
    throw CommError("no Unix socket can be opened for the ranks of this host (", describe_errno(errno), ")");
  const auto deadline = steady_clock::now() + timeout;
  // Only programs that can read the store know it.
  const std::string key = store.claim("key", random_digits(kTokenLength / 2));
  check_token(key, "key");
  ProvenSockets sockets(std::move(listener), rank_, key);
  // Names in the store have the ranks' numbers, by which the store's waits know who has ended.
  store.set(str("socket/", number_of(rank)), name);
  const std::vector<int> missing =
      store.await_ranks("socket/", numbers_, timeout, [&] { sockets.advance(milliseconds(0)); });
  if (!missing.empty())
    throw CommError(name_ranks(missing), " did not set up shared memory within ", name_duration(timeout));
  const std::vector<std::string> names = read_names(store);
  // The nearest first, so that not all ranks connect to the first one at the same time.
  for (int lower = rank_ - 1; lower >= 0; --lower) sockets.connect(lower, 0, address_of(names[lower]));
  await_peers(sockets, store, deadline, timeout);
}

/// What the ranks before this one have written.
std::vector<std::string> PeerSockets::read_names(const GroupStore& store) const {
  std::vector<int> numbers;
  for (int lower = 0; lower < rank_; ++lower) numbers.push_back(number_of(lower));
  std::vector<std::string> names = store.get_all("socket/", numbers);
  for (int lower = 0; lower < rank_; ++lower) check_token(names[lower], str("socket/", number_of(lower)));
  return names;
}

void PeerSockets::await_peers(ProvenSockets& sockets, const GroupStore& store,
                              steady_clock::time_point deadline, milliseconds timeout) {
  const auto absent = [&] {
    std::vector<int> numbers;
    for (int other = 0; other < size(); ++other) {
      if (other == rank_ || sockets_[other]) continue;
      sockets_[other] = sockets.take(other, 0);
      if (!sockets_[other]) numbers.push_back(number_of(other));
    }
    if (const std::vector<int> refused = sockets.refused(); !refused.empty())
      throw RankIsGone(number_of(refused.front()));
    return numbers;
  };
  for (std::vector<int> missing = absent(); !missing.empty(); missing = absent()) {
    sockets.advance(kWatchInterval);
    store.check_all_alive();
    if (steady_clock::now() < deadline) continue;
    missing = absent();
    if (!missing.empty())
      throw CommError(name_ranks(missing), missing.size() == 1 ? " has" : " have", " no connection to rank ",
                      number_of(rank_), " over a Unix socket within ", name_duration(timeout));
  }
}

void PeerSockets::send(int to, int fd, int64_t number, milliseconds timeout) {
  Message data{number, fd >= 0};
  iovec part{&data, sizeof data};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  const auto deadline = steady_clock::now() + timeout;
  while (sendmsg(sockets_[to].get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof data) {
    const int error = errno;
    if (error == EPIPE || error == ECONNRESET) throw RankIsGone(number_of(to));
    // A queue that is full, or too many descriptors under way: the receiver is behind.
    if (error != EINTR && error != EAGAIN && error != ETOOMANYREFS && error != ENOBUFS)
      throw CommError("shared memory cannot be handed to rank ", number_of(to), ": ", std::strerror(error));
    if (steady_clock::now() > deadline)
      throw CommError("timed out after ", name_duration(timeout), ": rank ", number_of(to),
                      " takes no shared memory");
    pollfd poll_fd{sockets_[to].get(), POLLOUT, 0};
    poll(&poll_fd, 1, static_cast<int>(kWatchInterval.count()));
    if (error == ETOOMANYREFS) std::this_thread::sleep_for(kWatchInterval);
  }
}

PeerSockets::Received PeerSockets::receive(int from, milliseconds timeout,
                                           const std::function<void()>& watch) {
  const auto deadline = steady_clock::now() + timeout;
  const auto has_come = [&](milliseconds wait) {
    return await_event(sockets_[from].get(), POLLIN, steady_clock::now() + wait);
  };
  while (!has_come(kWatchInterval)) {
    try {
      watch();
      if (const auto left = gone()) throw RankIsGone(*left);
    } catch (const CommError&) {
      if (has_come(milliseconds(0))) break;  // what it sent before it left counts
      throw;
    }
    if (steady_clock::now() > deadline)
      throw CommError("timed out after ", name_duration(timeout), ": rank ", number_of(from),
                      " has sent no shared memory");
  }
  Message data{};
  iovec part{&data, sizeof data};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  // A socket whose other end was closed with something unread says so once; what was sent comes after that.
  ssize_t got = 0;
  bool was_reset = false;
  do {
    got = recvmsg(sockets_[from].get(), &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(was_reset, true))));
  if (got != sizeof data) throw RankIsGone(number_of(from));
  Received received{{}, data.number};
  int fd = -1;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header))
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof fd))
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  received.fd = FileDescriptor(fd);
  if (!received.fd && data.has_fd != 0) {
    disconnect();
    throw CommError("rank ", number_of(from),
                    "'s shared memory did not arrive: too many open files (ulimit -H -n)");
  }
  return received;
}

void PeerSockets::disconnect() {
  for (const FileDescriptor& socket : sockets_)
    if (socket) shutdown(socket.get(), SHUT_RDWR);
}

std::optional<int> PeerSockets::gone() const {
  for (int rank = 0; rank < size(); ++rank)
    if (is_gone(rank)) return number_of(rank);
  return std::nullopt;
}

bool PeerSockets::is_gone(int rank) const {
  if (!sockets_[rank]) return false;
  pollfd poll_fd{sockets_[rank].get(), POLLRDHUP, 0};
  return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace tessera::comm::shm
