// PeerSockets: a Unix socket to every other rank on this host. It carries descriptors of shared memory, and
// it shows when the other process ends: the kernel closes it however the process ends.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/group_store.h"
#include "comm/sockets/proven_sockets.h"
#include "core/files/file_descriptor.h"

namespace tessera::comm::shm {

/// Owns the sockets. One thread at a time.
class PeerSockets {
 public:
  /// Collective. The ranks find each other through `store`. Sockets are abstract ones, without a file: every
  /// user of this network namespace sees them and can connect, so both ends prove that they know a secret
  /// from the store [Note: proven sockets]. `numbers`: by rank, what messages and RankIsGone call it. Throws
  /// CommError naming the ranks, RankIsGone.
  PeerSockets(const GroupStore& store, int rank, std::vector<int> numbers, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int number_of(int rank) const { return numbers_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(sockets_.size()); }

  /// The receiver calls receive(). A number, and a descriptor unless `fd` is -1. Throws CommError,
  /// RankIsGone.
  void send(int to, int fd, int64_t number, std::chrono::milliseconds timeout);
  struct Received {
    FileDescriptor fd;  ///< none, where none was sent
    int64_t number;
  };
  /// `watch` is called every few milliseconds and may throw. Throws CommError, RankIsGone.
  Received receive(int from, std::chrono::milliseconds timeout, const std::function<void()>& watch);
  /// Lets the others see this rank as gone: ranks that no longer agree do so.
  void disconnect();

  /// A system call. The number of a rank whose process has closed its end.
  std::optional<int> gone() const;
  bool is_gone(int rank) const;

 private:
  std::vector<std::string> read_names(const GroupStore& store) const;
  void await_peers(ProvenSockets& sockets, const GroupStore& store,
                   std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout);

  int rank_;
  std::vector<int> numbers_;
  std::vector<FileDescriptor> sockets_;  // by rank; this one's: none
};

}  // namespace tessera::comm::shm
