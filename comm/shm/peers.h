// Peers: a Unix socket to every other rank on this host. It carries descriptors of shared memory, and its end tells that
// the process behind it is gone: the kernel closes it however the process ends.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/group_store.h"

namespace tessera::comm::shm {

/// Owns the sockets. One thread at a time.
class Peers {
 public:
  /// Collective. The ranks meet under `store`. Sockets are abstract ones, without a file: every user of this network
  /// namespace sees them and can connect, so a secret from the store is asked for first. Throws CommError naming the ranks.
  Peers(const GroupStore& store, int rank, int size, std::chrono::milliseconds timeout);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(sockets_.size()); }

  /// Local; the receiver calls receive(). A number, and a descriptor unless `fd` is -1. Throws CommError.
  void send(int to, int fd, int64_t number, std::chrono::milliseconds timeout);
  struct Received {
    int fd;  ///< the caller's from here on; -1: none was sent
    int64_t number;
  };
  /// `watch` is called every few milliseconds and may throw.
  Received receive(int from, std::chrono::milliseconds timeout, const std::function<void()>& watch);
  /// Local. For when ranks are out of step: to all of them this rank is gone.
  void break_off();

  /// Local, a system call. A rank whose process has closed its end.
  std::optional<int> gone() const;

 private:
  int rank_;
  std::vector<int> sockets_;  // by rank; -1: this one
};

}  // namespace tessera::comm::shm
