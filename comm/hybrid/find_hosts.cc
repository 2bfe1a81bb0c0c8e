#include <atomic>
#include <functional>
#include <utility>

#include "comm/control/store_exchange.h"
#include "comm/hybrid/hybrid.h"
#include "comm/shm/shared_regions.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;

FoundHosts connect_hosts(const GroupStore& store, std::shared_ptr<const Hosts> hosts, int rank,
                         const std::vector<int>& names, milliseconds timeout) {
  const int host = hosts->host_of(rank);
  auto peers = std::make_shared<shm::PeerSockets>(store.under(str("host/", host)), hosts->index_of(rank),
                                                  chosen_from(names, hosts->ranks_of(host)), timeout);
  return {std::move(hosts), std::move(peers), ""};
}

FoundHosts find_hosts(const GroupStore& store, int rank, const std::vector<std::string>& may_share,
                      milliseconds timeout) {
  const auto size = static_cast<int>(may_share.size());
  FoundHosts found{std::make_shared<Hosts>(may_share), nullptr, ""};

  // A segment has a number for each rank of a host, which the rank writes and all the others read.
  shm::SharedMemory segment;
  const auto number_of = [&](int index) {
    return std::atomic_ref<int64_t>(reinterpret_cast<int64_t*>(segment.data())[index]);
  };
  const auto expected = [&](int index) { return int64_t{0x7e55e7a0} + found.peers->number_of(index); };
  const auto share = [&] {
    found = connect_hosts(store, found.hosts, rank, all_ranks(size), timeout);
    const int64_t bytes = shm::whole_pages(found.peers->size() * static_cast<int64_t>(sizeof(int64_t)));
    segment = shm::share_memory(*found.peers, bytes, timeout, [] {});
    number_of(found.peers->rank()).store(expected(found.peers->rank()), std::memory_order_release);
  };
  const auto check = [&] {
    for (int other = 0; other < found.peers->size(); ++other)
      if (number_of(other).load(std::memory_order_acquire) != expected(other))
        throw CommError("what rank ", found.peers->number_of(other),
                        " writes into shared memory is not seen");
  };
  StoreExchange exchange(store.under("host_probe"), rank, size);
  for (const std::function<void()>& step : {std::function<void()>(share), std::function<void()>(check)}) {
    std::string failure;
    try {
      step();
    } catch (const CommError& error) {
      failure = error.what();
    }
    found.obstacle = exchange.first_obstacle(failure, timeout, "host_probe");
    if (!found.obstacle.empty()) break;
  }
  return found;
}

}  // namespace tessera::comm
