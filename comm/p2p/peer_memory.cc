#include "comm/p2p/peer_memory.h"

#include <algorithm>
#include <utility>

#include "comm/control/liveness.h"
#include "comm/shm/shared_memory.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm::p2p {

std::shared_ptr<Region> PeerMemory::allocate(int64_t bytes, const std::function<void()>& watch) {
  const int rank = peers_->rank(), size = peers_->size();
  auto region = std::make_shared<Region>();
  region->bytes = std::max<int64_t>(bytes, 1);
  region->of_rank.resize(static_cast<size_t>(size));
  const auto send_all = [&](int fd) {
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      try {
        peers_->send(other, fd, region->bytes, timeout_);
      } catch (const RankIsGone&) {
        // It may have said why: receiving tells.
      }
    }
  };
  auto& mine = region->of_rank[static_cast<size_t>(rank)];
  FileDescriptor fd;
  try {
    mine = device_->allocate(region->bytes);
    fd = device_->share(*mine);
  } catch (const CommError&) {
    send_all(-1);
    throw;
  }
  send_all(fd.get());
  take_from_others(*region, watch);
  regions_.push_back(region);
  return region;
}

void PeerMemory::take_from_others(Region& region, const std::function<void()>& watch) {
  const int rank = peers_->rank();
  const auto named = [&](int which) { return str("rank ", peers_->number_of(which)); };
  for (int other = 0; other < peers_->size(); ++other) {
    if (other == rank) continue;
    shm::PeerSockets::Received received = peers_->receive(other, timeout_, watch);
    if (received.number != region.bytes)
      throw CommError(str(named(rank), " asks for ", region.bytes, " bytes of device memory, ", named(other),
                          " for ", received.number));
    if (!received.fd)
      throw CommError(str(named(other), " found no ", shm::mebibytes(region.bytes), " MiB of device memory"));
    try {
      region.of_rank[static_cast<size_t>(other)] = device_->adopt(std::move(received.fd), region.bytes);
    } catch (const CommError& error) {
      throw CommError(str(named(rank), " cannot map the memory of ", named(other), ": ", error.what()));
    }
  }
}

std::optional<PeerMemory::Location> PeerMemory::find(const void* begin, int64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(begin);
  for (size_t i = 0; i < regions_.size(); ++i) {
    const std::byte* base = regions_[i]->address(peers_->rank());
    if (first >= base && first + bytes <= base + regions_[i]->bytes)
      return Location{static_cast<int>(i), first - base};
  }
  return std::nullopt;
}

}  // namespace tessera::comm::p2p
