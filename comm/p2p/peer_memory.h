// PeerMemory: the device memory that the ranks of a group have mapped, and where a rank's buffer lies in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/control/peer_sockets.h"
#include "comm/p2p/device.h"

namespace tessera::comm::p2p {

/// `bytes` of each rank, by rank.
struct Region {
  int64_t bytes = 0;
  std::vector<std::shared_ptr<Memory>> of_rank;
  std::byte* address(int rank) const { return of_rank[static_cast<size_t>(rank)]->data(); }
};

/// Owns the regions. One thread at a time.
class PeerMemory {
 public:
  /// Where each rank's buffer is: the same region and offset.
  struct Location {
    int region = -1;
    int64_t offset = 0;
  };

  PeerMemory(std::shared_ptr<Device> device, std::shared_ptr<shm::PeerSockets> peers,
             std::chrono::milliseconds timeout)
      : device_(std::move(device)), peers_(std::move(peers)), timeout_(timeout) {}

  /// Collective. `bytes` of device memory of each rank, which all map. `watch` may throw to end the wait for
  /// the others. Throws CommError: no room on a rank, a rank cannot map another's, or ranks ask for different
  /// sizes.
  std::shared_ptr<Region> allocate(int64_t bytes, const std::function<void()>& watch);

  /// Nothing when this rank's memory at `begin` is not in a region.
  std::optional<Location> find(const void* begin, int64_t bytes) const;
  std::byte* address(const Location& location, int rank) const {
    return regions_[static_cast<size_t>(location.region)]->address(rank) + location.offset;
  }

 private:
  void take_from_others(Region& region, const std::function<void()>& watch);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<shm::PeerSockets> peers_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::shared_ptr<Region>> regions_;
};

}  // namespace tessera::comm::p2p
