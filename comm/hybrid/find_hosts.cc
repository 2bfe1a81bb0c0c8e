#include <algorithm>
#include <atomic>
#include <functional>

#include "comm/control/store_exchange.h"
#include "comm/hybrid/hybrid.h"
#include "comm/shm/shared_regions.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;

FoundHosts connect_one_host(const GroupStore& store, int rank, int size, milliseconds timeout) {
  return {std::make_shared<hybrid::Hosts>(std::vector<int>(static_cast<size_t>(size))),
          std::make_shared<shm::PeerSockets>(store.under("host/0"), rank, all_ranks(size), timeout), ""};
}

FoundHosts find_hosts(const GroupStore& store, int rank, const std::vector<std::string>& may_share,
                      milliseconds timeout) {
  std::vector<int> first;  // by rank: the first that has the same word
  for (const std::string& word : may_share)
    first.push_back(
        static_cast<int>(std::find(may_share.begin(), may_share.end(), word) - may_share.begin()));
  FoundHosts found;
  found.hosts = std::make_shared<hybrid::Hosts>(first);
  const int host = found.hosts->host_of(rank);
  const std::vector<int>& ranks = found.hosts->ranks_of(host);

  // A segment has a number for each rank of a host, which the rank writes and all the others read.
  shm::SharedMemory segment;
  const auto number_of = [&](int index) {
    return std::atomic_ref<int64_t>(reinterpret_cast<int64_t*>(segment.data())[index]);
  };
  const auto expected = [&](int index) { return int64_t{0x7e55e7a0} + found.peers->number_of(index); };
  const auto share = [&] {
    found.peers = std::make_shared<shm::PeerSockets>(store.under(str("host/", host)),
                                                     found.hosts->index_of(rank), ranks, timeout);
    const int64_t bytes = shm::whole_pages(static_cast<int64_t>(ranks.size() * sizeof(int64_t)));
    segment = shm::share_memory(*found.peers, bytes, timeout, [] {});
    number_of(found.peers->rank()).store(expected(found.peers->rank()), std::memory_order_release);
  };
  const auto check = [&] {
    for (int other = 0; other < found.peers->size(); ++other)
      if (number_of(other).load(std::memory_order_acquire) != expected(other))
        throw CommError("what rank ", found.peers->number_of(other),
                        " writes into shared memory is not seen");
  };
  StoreExchange exchange(store.under("host_probe"), rank, static_cast<int>(may_share.size()));
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
