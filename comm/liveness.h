// Liveness: tells which ranks' processes have ended, on every backend, on one host or several.
//
// [Note: how a dead rank is noticed]
// Each rank listens on a TCP port and connects to every other rank's. No byte is sent, and no connection is
// accepted: the kernel completes a connection for the socket that listens, and closes it when the process
// ends, however it ends. So a rank that waits asks its own kernel whether one of its connections is closed.
// That needs no thread and no heartbeat, and a rank that is busy, swapped out or stopped is not taken for
// dead. A host that is gone is found by the kernel's keep-alive, after kHostTimeout. Every wait in comm/
// asks: those of GroupStore, of collectives (transport_communicator.cc), and of the store that Gloo and NCCL
// get.
#pragma once

#include <poll.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file_descriptor.h"

namespace tessera::comm {

/// Processes of ranks have ended before they did their part. Of several all are named: one may have ended
/// because of another.
class RankIsGone : public CommError {
 public:
  explicit RankIsGone(std::vector<int> ranks);
  explicit RankIsGone(int rank) : RankIsGone(std::vector{rank}) {}
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// A host whose kernel has not answered for this long counts as gone.
inline constexpr std::chrono::seconds kHostTimeout{20};

/// Owns a listening socket and a connection to each other rank's. gone() may be called by any thread once
/// connect() has returned.
class Liveness {
 public:
  /// Local. Listens on `address`, which the other ranks can reach. Throws CommError.
  explicit Liveness(const std::string& address);
  /// Local. "ADDRESS PORT", for the others.
  const std::string& endpoint() const { return endpoint_; }
  /// Local. `endpoints`: of all ranks. Throws CommError when one cannot be reached, RankIsGone when it has
  /// ended.
  void connect(const std::vector<std::string>& endpoints, int rank, std::chrono::milliseconds timeout);

  /// Local, one system call. The ranks whose processes have ended.
  std::vector<int> gone() const;

 private:
  FileDescriptor listener_;
  std::string endpoint_;
  std::vector<FileDescriptor> connections_;
  std::vector<pollfd> polled_;  ///< by rank; this one's: -1
};

}  // namespace tessera::comm
