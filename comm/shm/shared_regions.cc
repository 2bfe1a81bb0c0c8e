#include "comm/shm/shared_regions.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace tessera::comm::shm {

int64_t whole_pages(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

SharedMemory share_memory(PeerSockets& peers, int64_t bytes, std::chrono::milliseconds timeout,
                          const std::function<void()>& watch) {
  if (peers.rank() == 0) {
    SharedMemory memory;
    try {
      memory = SharedMemory::create(bytes);
    } catch (const CommError&) {
      for (int other = 1; other < peers.size(); ++other) peers.send(other, -1, bytes, timeout);
      throw;
    }
    for (int other = 1; other < peers.size(); ++other) peers.send(other, memory.fd(), bytes, timeout);
    memory.close_fd();
    return memory;
  }
  const int first = peers.number_of(0);
  PeerSockets::Received received = peers.receive(0, timeout, watch);
  if (received.number != bytes)
    throw CommError("rank ", peers.number_of(peers.rank()), " expects ", bytes,
                    " bytes of shared memory, rank ", first, " made ", received.number);
  if (!received.fd) throw CommError("rank ", first, " found no ", mebibytes(bytes), " MiB of shared memory");
  try {
    SharedMemory memory = SharedMemory::adopt(std::move(received.fd), bytes);
    memory.close_fd();
    return memory;
  } catch (const CommError&) {
    peers.disconnect();  // rank 0 believes that this rank has it
    throw;
  }
}

std::shared_ptr<SharedRegion> SharedRegions::allocate(int64_t bytes, bool common,
                                                      const std::function<void()>& watch) {
  const int64_t pages = whole_pages(std::max<int64_t>(bytes, 1));
  auto region = std::make_shared<SharedRegion>();
  region->stride = common ? 0 : pages;
  region->memory = share_memory(*peers_, common ? pages : peers_->size() * pages, timeout_, watch);
  regions_.push_back(region);
  return region;
}

std::optional<SharedRegions::Location> SharedRegions::find(const void* begin, int64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(begin);
  for (size_t i = 0; i < regions_.size(); ++i) {
    const SharedRegion& region = *regions_[i];
    const std::byte* base = region.address(peers_->rank());
    if (first >= base && first + bytes <= base + (region.is_common() ? region.memory.bytes() : region.stride))
      return Location{static_cast<int>(i), first - base};
  }
  return std::nullopt;
}

const void* SharedRegions::peer_address(const void* mine, int64_t bytes, int rank) const {
  const auto location = find(mine, bytes);
  return location && !region(*location).is_common() ? address(*location, rank) : nullptr;
}

}  // namespace tessera::comm::shm
