// Liveness: tells which ranks' processes have ended, on every backend, on one host or several.
//
// How a dead rank is noticed.
// Each pair of ranks has a TCP connection, over which no byte is sent once both ends are proven [Note: proven
// sockets]. The kernel closes it when a process ends, however it ends. So a rank that waits asks its own
// kernel whether one of its connections is closed. That needs no thread, and a rank that is busy, swapped out
// or stopped is not taken for dead. A host that is gone closes nothing. So each pair of hosts has one more
// connection, of their lowest ranks, whose kernels ask each other every few seconds (keep_alive() in tcp.h),
// and which every rank of a host has: a descriptor of it is passed on over Unix sockets. It is closed once
// the other host's kernel has not answered for kHostTimeout. Where both hosts have one rank, their ranks'
// connection serves for both. Every wait in comm/ asks: those of GroupStore, of collectives
// (transport_communicator.cc), and of the store that Gloo and NCCL get.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/hosts.h"
#include "comm/sockets/proven_sockets.h"
#include "core/files/file_descriptor.h"
#include "core/peer_failure.h"

namespace tessera::comm {

class GroupStore;
namespace shm {
class PeerSockets;
}

/// Says that processes of ranks have ended before they did their part. Of several all are named: one may have
/// ended because of another.
class RankIsGone : public PeerFailure {
 public:
  /// `why`: for messages.
  explicit RankIsGone(std::vector<int> ranks, const std::string& why = kConnectionClosed);
  explicit RankIsGone(int rank) : RankIsGone(std::vector{rank}) {}
  static constexpr const char* kConnectionClosed = "connection closed";
  static constexpr const char* kHostIsSilent = "its host has not answered for 20 s";
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// A host whose kernel has not answered for this long counts as gone.
inline constexpr std::chrono::seconds kHostTimeout{20};

/// Owns the connections, and a listening socket until all ranks are connected. gone() may be called by any
/// thread once connect() has returned.
class Liveness {
 public:
  /// Listens on `address`, which the other ranks can reach. `key`: of ProvenSockets. `store_rank`: the
  /// one that serves the store; -1: none does. Throws CommError.
  Liveness(const std::string& address, int rank, std::string key, int store_rank);
  ~Liveness();
  /// "ADDRESS PORT", for the others.
  const std::string& endpoint() const { return endpoint_; }
  /// Has to be called while this rank waits for others to come: takes connections, and closes strangers'.
  void admit();
  /// Collective. `endpoints`: by rank, of all ranks. Ranks of one of `hosts` reach each other over the
  /// loopback interface. Other ranks may still be connecting to each other when it returns. `watch` is called
  /// every 20 ms and may throw. Throws CommError when one cannot be reached, RankIsGone when it has ended.
  void connect(const std::vector<std::string>& endpoints, Hosts hosts, std::chrono::milliseconds timeout,
               const std::function<void()>& watch);
  /// Collective. All ranks of a host get its connections to other hosts. What it returns has to live until
  /// all ranks have returned. Throws CommError, RankIsGone.
  std::unique_ptr<shm::PeerSockets> share_between_hosts(const GroupStore& store,
                                                        std::chrono::milliseconds timeout);
  /// Requires: all ranks are connected.
  void stop_listening();

  /// One system call. The ranks whose processes have ended, or whose hosts do not answer.
  std::vector<int> gone() const;
  /// Returns the ranks whose hosts do not answer.
  std::vector<int> silent() const;
  /// Has to be called before a request to the store: waits while its host does not answer. False: that
  /// counts as gone. A request to a silent host fails kHostTimeout after it was sent; so none is sent late.
  bool await_store() const;
  /// The error of such ranks.
  RankIsGone error_of(std::vector<int> ranks) const;

 private:
  std::vector<pollfd> ask() const;

  const int rank_, store_rank_;
  int store_connection_ = -1;  ///< that shows whether its host answers; -1: it is this one
  std::unique_ptr<ProvenSockets> sockets_;
  std::string endpoint_;
  Hosts hosts_;
  std::vector<FileDescriptor> connections_;
  std::vector<FileDescriptor> between_hosts_;  ///< by host; none where a connection between ranks serves
  std::vector<pollfd> polled_;                 ///< by rank, then by host; none: -1
};

}  // namespace tessera::comm
