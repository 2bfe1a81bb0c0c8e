#include "comm/sockets/proven_sockets.h"

#include <fcntl.h>
#include <poll.h>
#include <sodium.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/check.h"
#include "core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// How long a connection may take to say who it is, or to answer.
constexpr milliseconds kGreetingTime{10000};
/// After a connection that was closed the next one is opened so much later.
constexpr milliseconds kPause{20};
/// Connections with a right hello and without a proof: a recorded hello, sent again and again.
constexpr size_t kMostGreeted = 1024;
/// Connections that are taken before the others are looked at again.
constexpr int kMostTaken = 1024;
constexpr std::array<char, 8> kMagic{'t', 'e', 's', 's', 'e', 'r', 'a', '6'};

template <class Message>
bool send_whole(int fd, const Message& message) {
  return ::send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof message);
}

}  // namespace

/// Reads a message of a fixed length as it comes.
template <class Message>
class ProvenSockets::Incomplete {
 public:
  /// Reads what has come. False: the connection is closed.
  bool read(int fd) {
    while (have_ < sizeof(Message)) {
      const ssize_t count =
          ::recv(fd, reinterpret_cast<char*>(&message_) + have_, sizeof(Message) - have_, MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN) return true;
      if (count <= 0) {
        if (count == 0) errno = ECONNRESET;
        return false;
      }
      have_ += static_cast<size_t>(count);
    }
    return true;
  }
  bool is_whole() const { return have_ == sizeof(Message); }
  const Message& message() const { return message_; }

 private:
  Message message_{};
  size_t have_ = 0;
};

/// A connection that this rank opens.
struct ProvenSockets::Outgoing {
  struct Answer {
    Word word;
    Hash hash;
  };
  enum class State { kWaiting, kConnecting, kGreeted, kProven };

  int to, channel;
  SocketAddress address;
  State state = State::kWaiting;
  Clock::time_point at{};  ///< kWaiting: when to begin; else when to give up
  FileDescriptor fd{};
  Word word{};
  Incomplete<Answer> answer{};
  Incomplete<char> taken{};
  int error = 0;
  bool refused = false;
  bool ready = false;  ///< the kernel has something for it
};

/// One that another program has opened.
struct ProvenSockets::Incoming {
  struct Hello {
    std::array<char, 8> magic;
    int32_t from, to, channel, unused;
    Word word;
    Hash hash;
  };

  FileDescriptor fd;
  Clock::time_point until;
  Incomplete<Hello> hello{};
  Incomplete<Hash> proof{};
  bool said_hello = false;
  Word word{};         ///< this rank's
  bool ready = false;  ///< the kernel has something for it
};

ProvenSockets::ProvenSockets(FileDescriptor listener, int rank, std::string key)
    : listener_(std::move(listener)), rank_(rank), key_(std::move(key)) {
  TESSERA_CHECK(key_.size() >= crypto_generichash_KEYBYTES_MIN &&
                key_.size() <= crypto_generichash_KEYBYTES_MAX);
  if (sodium_init() < 0) throw CommError("libsodium finds no source of random numbers");
  // A connection may be gone between poll() and accept().
  fcntl(listener_.get(), F_SETFL, fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
}

ProvenSockets::~ProvenSockets() = default;

ProvenSockets::Hash ProvenSockets::hash(const char* purpose, int from, int to, int channel, const Word& first,
                                        const Word& second) const {
  crypto_generichash_state state;
  Hash result{};
  crypto_generichash_init(&state, reinterpret_cast<const unsigned char*>(key_.data()), key_.size(),
                          result.size());
  std::array<char, 8> name{};
  std::memcpy(name.data(), purpose, std::min(std::strlen(purpose), name.size()));
  const std::array<int32_t, 3> numbers{from, to, channel};
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(name.data()), name.size());
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(numbers.data()), sizeof numbers);
  crypto_generichash_update(&state, first.data(), first.size());
  crypto_generichash_update(&state, second.data(), second.size());
  crypto_generichash_final(&state, result.data(), result.size());
  return result;
}

void ProvenSockets::connect(int to, int channel, const SocketAddress& address) {
  outgoing_.push_back({.to = to, .channel = channel, .address = address});
}

FileDescriptor ProvenSockets::take(int peer, int channel) {
  const auto found = proven_.find({peer, channel});
  if (found == proven_.end()) return {};
  FileDescriptor fd = std::move(found->second);
  proven_.erase(found);
  return fd;
}

std::vector<int> ProvenSockets::refused() const {
  std::vector<int> ranks;
  for (const Outgoing& socket : outgoing_)
    if (socket.refused) ranks.push_back(socket.to);
  return ranks;
}

int ProvenSockets::last_error(int to) const {
  for (const Outgoing& socket : outgoing_)
    if (socket.to == to && socket.error != 0) return socket.error;
  return 0;
}

/// Of those that wait, the ones that have waited longest begin first.
void ProvenSockets::begin_waiting() {
  auto num_begun =
      std::ranges::count_if(outgoing_, [](const Outgoing& socket) { return static_cast<bool>(socket.fd); });
  const auto begins_at = [](const Outgoing& socket) {
    return socket.state == Outgoing::State::kWaiting ? socket.at : Clock::time_point::max();
  };
  for (; num_begun < kMostAtOnce && !outgoing_.empty(); ++num_begun) {
    const auto next = std::ranges::min_element(outgoing_, {}, begins_at);
    if (begins_at(*next) > Clock::now()) return;
    begin(*next);
  }
}

void ProvenSockets::advance(milliseconds limit) {
  begin_waiting();
  const auto now = Clock::now();
  auto until = now + limit;
  std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
  std::vector<bool*> ready{nullptr};
  for (Outgoing& socket : outgoing_) {
    if (socket.at > now) until = std::min(until, socket.at);
    if (!socket.fd) continue;
    polled.push_back({socket.fd.get(),
                      static_cast<short>(socket.state == Outgoing::State::kConnecting ? POLLOUT : POLLIN),
                      0});
    ready.push_back(&socket.ready);
  }
  for (Incoming& socket : incoming_) {
    polled.push_back({socket.fd.get(), POLLIN, 0});
    ready.push_back(&socket.ready);
  }
  const auto wait = std::chrono::ceil<milliseconds>(until - now).count();
  ::poll(polled.data(), polled.size(), static_cast<int>(std::clamp<int64_t>(wait, 0, limit.count())));
  for (size_t i = 1; i < polled.size(); ++i) *ready[i] = polled[i].revents != 0;
  accept_all();
  std::erase_if(outgoing_, [&](Outgoing& socket) { return advance(socket); });
  std::erase_if(incoming_, [&](Incoming& socket) { return advance(socket); });
  close_oldest(/*said_hello=*/true, kMostGreeted);
}

void ProvenSockets::close_oldest(bool said_hello, size_t most) {
  const auto same = [&](const Incoming& socket) { return socket.said_hello == said_hello; };
  for (auto count = std::count_if(incoming_.begin(), incoming_.end(), same);
       count > static_cast<std::ptrdiff_t>(most); --count)
    incoming_.erase(std::find_if(incoming_.begin(), incoming_.end(), same));
}

void ProvenSockets::accept_all() {
  for (int i = 0; i < kMostTaken; ++i) {
    FileDescriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) close_oldest(/*said_hello=*/false, 0);
      return;
    }
    Incoming& socket = incoming_.emplace_back(Incoming{std::move(fd), Clock::now() + kGreetingTime});
    socket.ready = true;
    if (advance(socket)) incoming_.pop_back();  // mostly closed already, or its hello is there
    close_oldest(/*said_hello=*/false, kMostStrangers);
  }
}

/// True: it is done with.
bool ProvenSockets::advance(Incoming& socket) {
  if (Clock::now() >= socket.until) return true;
  if (!socket.ready) return false;
  const int fd = socket.fd.get();
  if (!socket.said_hello) {
    if (!socket.hello.read(fd)) return true;
    if (!socket.hello.is_whole()) return false;
    const Incoming::Hello& hello = socket.hello.message();
    const Hash expected = hash("hello", hello.from, rank_, hello.channel, hello.word, Word{});
    if (hello.magic != kMagic || hello.to != rank_ || hello.from == rank_ ||
        sodium_memcmp(expected.data(), hello.hash.data(), expected.size()) != 0)
      return true;
    randombytes_buf(socket.word.data(), socket.word.size());
    const Outgoing::Answer answer{socket.word,
                                  hash("answer", hello.from, rank_, hello.channel, hello.word, socket.word)};
    if (!send_whole(fd, answer)) return true;
    socket.said_hello = true;
  }
  if (!socket.proof.read(fd)) return true;
  if (!socket.proof.is_whole()) return false;
  const Incoming::Hello& hello = socket.hello.message();
  const Hash expected = hash("proof", hello.from, rank_, hello.channel, hello.word, socket.word);
  if (sodium_memcmp(expected.data(), socket.proof.message().data(), expected.size()) != 0) return true;
  if (send_whole(fd, 'y')) proven_[{hello.from, hello.channel}] = std::move(socket.fd);
  return true;
}

void ProvenSockets::begin_again(Outgoing& socket, int error) {
  socket.fd.reset();
  socket.ready = false;
  socket.error = error;
  socket.refused = socket.refused || error == ECONNREFUSED;
  socket.state = Outgoing::State::kWaiting;
  socket.at = Clock::now() + kPause;
}

void ProvenSockets::begin(Outgoing& socket) {
  socket.answer = {};
  socket.taken = {};
  socket.fd = FileDescriptor(
      ::socket(socket.address.address.ss_family, socket.address.kind | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.fd) return begin_again(socket, errno);
  socket.state = Outgoing::State::kConnecting;
  socket.at = Clock::now() + kGreetingTime;
  if (::connect(socket.fd.get(), reinterpret_cast<const sockaddr*>(&socket.address.address),
                socket.address.length) != 0 &&
      errno != EINPROGRESS && errno != EINTR)
    begin_again(socket, errno);
}

/// True: it is done with.
bool ProvenSockets::advance(Outgoing& socket) {
  using State = Outgoing::State;
  if (socket.state == State::kWaiting) return false;
  if (Clock::now() >= socket.at) return begin_again(socket, ETIMEDOUT), false;
  if (!socket.ready) return false;
  const int fd = socket.fd.get();
  if (socket.state == State::kConnecting) {
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return begin_again(socket, error), false;
    randombytes_buf(socket.word.data(), socket.word.size());
    const Incoming::Hello hello{kMagic,
                                rank_,
                                socket.to,
                                socket.channel,
                                0,
                                socket.word,
                                hash("hello", rank_, socket.to, socket.channel, socket.word, Word{})};
    if (!send_whole(fd, hello)) return begin_again(socket, errno), false;
    socket.state = State::kGreeted;
    socket.at = Clock::now() + kGreetingTime;
  }
  if (socket.state == State::kGreeted) {
    if (!socket.answer.read(fd)) return begin_again(socket, errno), false;
    if (!socket.answer.is_whole()) return false;
    const Outgoing::Answer& answer = socket.answer.message();
    const Hash expected = hash("answer", rank_, socket.to, socket.channel, socket.word, answer.word);
    if (sodium_memcmp(expected.data(), answer.hash.data(), expected.size()) != 0)
      return begin_again(socket, EPROTO), false;
    if (!send_whole(fd, hash("proof", rank_, socket.to, socket.channel, socket.word, answer.word)))
      return begin_again(socket, errno), false;
    socket.state = State::kProven;
    socket.at = Clock::time_point::max();  // the other end may have taken it, and closes it if it does not
  }
  if (!socket.taken.read(fd)) return begin_again(socket, errno), false;
  if (!socket.taken.is_whole()) return false;
  proven_[{socket.to, socket.channel}] = std::move(socket.fd);
  return true;
}

}  // namespace tessera::comm
