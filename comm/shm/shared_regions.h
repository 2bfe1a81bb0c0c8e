// SharedRegions: the memory that the ranks of one host have mapped for one group, and where a rank's buffer
// lies in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/control/peer_sockets.h"
#include "comm/shm/shared_memory.h"

namespace tessera::comm::shm {

/// `bytes`, rounded up to whole pages.
int64_t whole_pages(int64_t bytes);

/// Copies, unless both addresses are the same.
void copy_bytes(void* to, const void* from, int64_t bytes);

/// Collective over the peers. Rank 0 makes `bytes` zeros, the others map them. `watch` may throw to end the
/// wait for it. Throws CommError: no room, or ranks ask for different sizes.
SharedMemory share_memory(PeerSockets& peers, int64_t bytes, std::chrono::milliseconds timeout,
                          const std::function<void()>& watch);

/// Owns memory that every rank has mapped: `stride` bytes for each, one rank's after another's; 0: the same
/// bytes for all.
struct SharedRegion {
  SharedMemory memory;
  int64_t stride = 0;
  bool is_common() const { return stride == 0; }
  std::byte* address(int rank) const { return memory.data() + rank * stride; }
};

/// Owns the regions. One thread at a time.
class SharedRegions {
 public:
  /// Says where each rank's buffer is: in the same region at the same offset.
  struct Location {
    int region = -1;
    int64_t offset = 0;
  };

  SharedRegions(std::shared_ptr<PeerSockets> peers, std::chrono::milliseconds timeout)
      : peers_(std::move(peers)), timeout_(timeout) {}

  /// Collective. `bytes` a rank, zeros, from a page boundary on (`common`: the same bytes for all ranks).
  std::shared_ptr<SharedRegion> allocate(int64_t bytes, bool common, const std::function<void()>& watch);

  /// Nothing when this rank's memory at `begin` is not in a region.
  std::optional<Location> find(const void* begin, int64_t bytes) const;
  std::byte* address(const Location& location, int rank) const {
    return regions_[location.region]->address(rank) + location.offset;
  }
  const SharedRegion& region(const Location& location) const { return *regions_[location.region]; }
  /// Where `rank` has what this rank has at `mine`; null when that is not in a region with memory for
  /// each rank.
  const void* peer_address(const void* mine, int64_t bytes, int rank) const;

 private:
  const std::shared_ptr<PeerSockets> peers_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::shared_ptr<SharedRegion>> regions_;
};

}  // namespace tessera::comm::shm
