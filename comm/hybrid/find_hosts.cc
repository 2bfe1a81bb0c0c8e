#include <algorithm>
#include <atomic>

#include "comm/control/error_message.h"
#include "comm/control/store_exchange.h"
#include "comm/hybrid/hybrid.h"
#include "comm/shm/shared_regions.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// Collective. What each rank says, or throws if one has left.
std::vector<std::string> exchanged(StoreExchange& exchange, const std::string& mine, milliseconds timeout) {
  StoreExchange::Result result = exchange.run(mine, timeout, [] {});
  if (!result.missing.empty())
    throw CommError(str(name_ranks(result.missing), " left during the rendezvous"));
  if (result.values.empty()) throw CommError(str("while ranks told each other their hosts: ", result.cause));
  return std::move(result.values);
}

std::string first_of(const std::vector<std::string>& values) {
  for (size_t rank = 0; rank < values.size(); ++rank)
    if (!values[rank].empty()) return str("rank ", rank, ": ", values[rank]);
  return "";
}

/// A segment with a number for each rank of a host.
class Probe {
 public:
  Probe(shm::PeerSockets& peers, milliseconds timeout)
      : peers_(peers),
        memory_(shm::share_memory(peers, shm::whole_pages(peers.size() * int64_t{sizeof(int64_t)}), timeout,
                                  [] {})) {
    entry(peers.rank()).store(expected(peers.rank()), std::memory_order_release);
  }

  /// Once all have written.
  void check() const {
    for (int other = 0; other < peers_.size(); ++other)
      if (entry(other).load(std::memory_order_acquire) != expected(other))
        throw CommError(str("what rank ", peers_.number_of(other), " writes into shared memory is not seen"));
  }

 private:
  int64_t expected(int other) const { return 0x7e55e7a0 + peers_.number_of(other); }
  std::atomic_ref<int64_t> entry(int other) const {
    return std::atomic_ref<int64_t>(reinterpret_cast<int64_t*>(memory_.data())[other]);
  }

  shm::PeerSockets& peers_;
  shm::SharedMemory memory_;
};

}  // namespace

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

  StoreExchange exchange(store.under("host_probe"), rank, static_cast<int>(may_share.size()));
  std::string failure;
  std::unique_ptr<Probe> probe;
  const auto attempt = [&](const auto& function) {
    if (!failure.empty()) return;
    try {
      function();
    } catch (const CommError& error) {
      failure = error.what();
    }
  };
  attempt([&] {
    found.peers =
        std::make_shared<shm::PeerSockets>(store.under(str("host/", host)), found.hosts->index_of(rank),
                                           static_cast<int>(ranks.size()), timeout, ranks);
    probe = std::make_unique<Probe>(*found.peers, timeout);
  });
  found.obstacle = first_of(exchanged(exchange, failure, timeout));
  if (!found.obstacle.empty()) return found;
  attempt([&] { probe->check(); });
  found.obstacle = first_of(exchanged(exchange, failure, timeout));
  return found;
}

}  // namespace tessera::comm
