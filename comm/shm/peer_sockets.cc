#include "comm/shm/peer_sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/error_message.h"
#include "comm/liveness.h"
#include "comm/tcp.h"
#include "core/error.h"
#include "core/random_digits.h"
#include "core/str.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

CommError failed(const char* what) {
  return CommError(str("shared memory between the ranks: ", what, ": ", std::strerror(errno)));
}

FileDescriptor new_socket() {
  FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw failed("socket");
  return fd;
}

constexpr size_t kTokenLength = 32;

/// What a rank has written to the store.
void check_token(const std::string& token, const char* key, int rank) {
  if (token.size() != kTokenLength)
    throw CommError(str("the store has ", token.size(), " bytes as ", key, rank, ", not ", kTokenLength));
}

/// A name that begins with NUL lives in the kernel's table only.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& token) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "tessera-" + token;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

struct Greeting {
  char secret[kTokenLength];
  int32_t rank;
};

/// What travels: a number, and whether a descriptor travels with it.
struct Message {
  int64_t number;
  int64_t has_fd;
};

/// How long a connection may take to send its greeting: a foreign program must not hold up the ranks.
constexpr milliseconds kGreetingTime{1000};
constexpr milliseconds kWatchInterval{20};

}  // namespace

PeerSockets::PeerSockets(const GroupStore& store, int rank, int size, milliseconds timeout,
                         std::vector<int> numbers)
    : rank_(rank), numbers_(std::move(numbers)), sockets_(static_cast<size_t>(size)) {
  const FileDescriptor listener = new_socket();
  const std::string name = random_digits(kTokenLength / 2);  // every program on this host can see it
  const std::string secret =
      random_digits(kTokenLength / 2);  // only programs that can read the store know it
  const auto [address, length] = address_of(name);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) throw failed("bind");
  if (listen(listener.get(), size) != 0) throw failed("listen");
  // Keys have the ranks' numbers, by which the store's waits know who has ended.
  store.set(str("secret/", number_of(rank)), secret);
  store.set(str("socket/", number_of(rank)), name);
  std::vector<int> all;
  for (int other = 0; other < size; ++other) all.push_back(number_of(other));
  const std::vector<int> missing = store.await_ranks("socket/", all, timeout, [] {});
  if (!missing.empty())
    throw CommError(
        str(name_ranks(missing), " did not set up shared memory within ", name_duration(timeout)));
  connect_to_lower(store);
  accept_higher(store, listener.get(), secret, timeout);
}

std::vector<std::string> PeerSockets::read_tokens(const GroupStore& store, const char* key) const {
  std::vector<std::string> tokens;
  if (numbers_.empty()) {
    tokens = store.get_all(key, rank_);
  } else {
    for (int lower = 0; lower < rank_; ++lower) tokens.push_back(store.get(str(key, number_of(lower))));
  }
  for (int lower = 0; lower < rank_; ++lower) check_token(tokens[lower], key, number_of(lower));
  return tokens;
}

void PeerSockets::connect_to_lower(const GroupStore& store) {
  if (rank_ == 0) return;
  const std::vector<std::string> names = read_tokens(store, "socket/");
  const std::vector<std::string> secrets = read_tokens(store, "secret/");
  for (int lower = 0; lower < rank_; ++lower) {
    FileDescriptor out = new_socket();
    const auto [theirs, theirs_length] = address_of(names[lower]);
    if (connect(out.get(), reinterpret_cast<const sockaddr*>(&theirs), theirs_length) != 0) {
      if (errno == ECONNREFUSED) throw RankIsGone(number_of(lower));
      throw CommError(str("rank ", number_of(rank_), " cannot reach rank ", number_of(lower),
                          " over a Unix socket: ", std::strerror(errno)));
    }
    Greeting greeting{};
    secrets[lower].copy(greeting.secret, sizeof greeting.secret);
    greeting.rank = rank_;
    if (::send(out.get(), &greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting) throw failed("send");
    sockets_[lower] = std::move(out);
  }
}

void PeerSockets::accept_higher(const GroupStore& store, int listener, const std::string& secret,
                                milliseconds timeout) {
  const auto deadline = steady_clock::now() + timeout;
  for (int num_expected = size() - 1 - rank_; num_expected > 0;) {
    while (!await_event(listener, POLLIN, steady_clock::now() + kWatchInterval)) {
      store.check_all_alive();
      if (steady_clock::now() < deadline) continue;
      std::vector<int> absent;
      for (int higher = rank_ + 1; higher < size(); ++higher)
        if (!sockets_[higher]) absent.push_back(number_of(higher));
      throw CommError(str(name_ranks(absent), " did not connect to rank ", number_of(rank_),
                          " over a Unix socket within ", name_duration(timeout)));
    }
    FileDescriptor in(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!in) throw failed("accept");
    Greeting greeting{};
    if (!await_event(in.get(), POLLIN, std::min(deadline, steady_clock::now() + kGreetingTime))) continue;
    if (recv(in.get(), &greeting, sizeof greeting, 0) != sizeof greeting) continue;
    const bool known = std::memcmp(greeting.secret, secret.data(), sizeof greeting.secret) == 0;
    if (!known || greeting.rank <= rank_ || greeting.rank >= size() || sockets_[greeting.rank])
      continue;  // not one of the ranks
    sockets_[greeting.rank] = std::move(in);
    --num_expected;
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
      throw CommError(
          str("shared memory cannot be handed to rank ", number_of(to), ": ", std::strerror(error)));
    if (steady_clock::now() > deadline)
      throw CommError(str("timed out after ", name_duration(timeout), ": rank ", number_of(to),
                          " takes no shared memory"));
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
      throw CommError(str("timed out after ", name_duration(timeout), ": rank ", number_of(from),
                          " has sent no shared memory"));
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
    throw CommError(
        str("rank ", number_of(from), "'s shared memory did not arrive: too many open files (ulimit -n)"));
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
