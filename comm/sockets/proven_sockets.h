// ProvenSockets: sockets between ranks, TCP or Unix, made while strangers connect to the same listeners.
//
// [Note: proven sockets]
// Each pair of ranks has one socket, which the higher rank opens to the lower one's listener. Both prove that
// they know a key that the ranks have exchanged over the store, each by a keyed hash (BLAKE2b) of both ranks'
// numbers and of random words of both, so nothing that was recorded counts again:
//   the higher:  hello (who, to whom, its word, hash)
//   the lower:   answer (its word, hash)
//   the higher:  proof (hash)
//   the lower:   one byte: taken
// A listener takes every connection at once, so its queue does not fill. Of connections without a right hello
// it keeps kMostStrangers for at most kGreetingTime, and closes the oldest of more; a rank whose connection
// is closed before it is taken opens another. So strangers, silent, sending or connecting without end, cost
// some computation while ranks connect, and no more descriptors than that.
// A rank works at kMostAtOnce of its own connections at a time, so that ranks that all connect at the same
// time fill no listener's queue, and what is looked at grows with what happens and not with their number.
#pragma once

#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/files/file_descriptor.h"

namespace tessera::comm {

/// Has what connect(2) takes, with the kind of the socket.
struct SocketAddress {
  sockaddr_storage address{};
  socklen_t length = 0;
  int kind = SOCK_STREAM;
};

/// Owns a listener and the sockets until take(). One thread at a time.
class ProvenSockets {
 public:
  static constexpr size_t kMostStrangers = 64;
  static constexpr int kMostAtOnce = 32;

  /// `rank`: this rank's number, and `key` the group's, equal for its ranks: 16 to 64 bytes.
  ProvenSockets(FileDescriptor listener, int rank, std::string key);
  ~ProvenSockets();

  /// Begins to connect to rank `to`. `channel` tells apart several sockets between two ranks.
  void connect(int to, int channel, const SocketAddress& address);
  /// Takes every step that can be taken, after waiting up to `limit` until there is one. To be called
  /// again and again, also by a rank that expects nobody yet, so that the listener's queue stays short.
  void advance(std::chrono::milliseconds limit);

  /// Returns the proven socket between this rank and `peer`, whoever opened it, which does not block; none if
  /// there is none.
  FileDescriptor take(int peer, int channel);
  /// The ranks that have refused a connection, which means that their listeners are closed.
  std::vector<int> refused() const;
  /// The last error of the connections to `to`; 0: none yet.
  int last_error(int to) const;

 private:
  using Clock = std::chrono::steady_clock;
  using Word = std::array<unsigned char, 16>;
  using Hash = std::array<unsigned char, 32>;
  template <class Message>
  class Incomplete;
  struct Outgoing;
  struct Incoming;

  Hash hash(const char* purpose, int from, int to, int channel, const Word& first, const Word& second) const;
  void begin_waiting();
  void accept_all();
  bool advance(Outgoing& socket);
  bool advance(Incoming& socket);
  void begin(Outgoing& socket);
  void begin_again(Outgoing& socket, int error);
  void close_oldest(bool said_hello, size_t most);

  const FileDescriptor listener_;
  const int rank_;
  const std::string key_;
  std::list<Outgoing> outgoing_;
  std::list<Incoming> incoming_;
  std::map<std::pair<int, int>, FileDescriptor> proven_;  ///< by peer and channel
};

}  // namespace tessera::comm
