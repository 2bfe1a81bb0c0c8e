#include "comm/control/liveness.h"

#include <algorithm>
#include <cerrno>
#include <set>
#include <thread>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/group_store.h"
#include "comm/control/peer_sockets.h"
#include "comm/sockets/tcp.h"
#include "core/files/disk_error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// Channels of ProvenSockets say what a connection is for.
constexpr int kBetweenRanks = 0, kBetweenHosts = 1;

constexpr milliseconds kWatchInterval{20};
/// A rank that has not connected for this long is asked whether it is there, and again after every such time.
constexpr milliseconds kProbeInterval{500};
/// A host that has not answered for this long is probably gone: the kernel has asked it more than once since.
constexpr milliseconds kQuietTime{6500};
constexpr short kEnd = POLLRDHUP | POLLHUP | POLLERR;

CommError unreachable(int rank, const std::string& endpoint, const std::string& why) {
  return CommError(
      "rank ", rank, " cannot be reached at ", endpoint, " (", why,
      "): ranks need TCP connections to each other; GLOO_SOCKET_IFNAME names the network interface to use");
}

Addresses resolve_endpoint(int rank, const std::string& endpoint) {
  const size_t space = endpoint.find(' ');
  if (space == std::string::npos) throw unreachable(rank, endpoint, "no address");
  return resolve_numeric(endpoint.substr(0, space), endpoint.substr(space + 1));
}

SocketAddress address_of(const addrinfo& found) {
  SocketAddress address;
  std::copy_n(reinterpret_cast<const char*>(found.ai_addr), found.ai_addrlen,
              reinterpret_cast<char*>(&address.address));
  address.length = found.ai_addrlen;
  return address;
}

}  // namespace

RankIsGone::RankIsGone(std::vector<int> ranks, const std::string& why)
    : PeerFailure(name_ranks(ranks), ranks.size() == 1 ? " is" : " are", " gone (", why, ")"),
      ranks_(std::move(ranks)) {}

Liveness::Liveness(const std::string& address, int rank, std::string key, int store_rank)
    : rank_(rank), store_rank_(store_rank) {
  const Addresses found = resolve_numeric(address, "0");
  FileDescriptor listener = listen_at(found->ai_family, found->ai_addr, found->ai_addrlen);
  if (!listener) throw CommError("no TCP port can be opened at ", address, " (", describe_errno(errno), ")");
  endpoint_ = str(address, ' ', port_of(listener.get()));
  sockets_ = std::make_unique<ProvenSockets>(std::move(listener), rank, std::move(key));
}

Liveness::~Liveness() = default;

void Liveness::admit() {
  if (sockets_) sockets_->advance(milliseconds(0));
}

void Liveness::connect(const std::vector<std::string>& endpoints, Hosts hosts, milliseconds timeout,
                       const std::function<void()>& watch) {
  const auto deadline = Clock::now() + timeout;
  hosts_ = std::move(hosts);
  const int mine = hosts_.host_of(rank_);
  const auto both_alone = [&](int host) {
    return host != mine && hosts_.ranks_of(host).size() + hosts_.ranks_of(mine).size() == 2;
  };
  connections_.resize(endpoints.size());
  between_hosts_.resize(static_cast<size_t>(hosts_.num_hosts()));

  // The higher rank connects. Between hosts the lowest ranks do.
  std::vector<std::pair<int, int>> expected;
  for (int other = 0; other < hosts_.num_ranks(); ++other) {
    if (other == rank_) continue;
    expected.emplace_back(other, kBetweenRanks);
    const int host = hosts_.host_of(other);
    const bool both_lowest = hosts_.index_of(other) == 0 && hosts_.index_of(rank_) == 0;
    if (host != mine && both_lowest && !both_alone(host)) expected.emplace_back(other, kBetweenHosts);
  }
  // The nearest first, so that not all ranks connect to rank 0 at the same time.
  for (auto one = expected.rbegin(); one != expected.rend(); ++one)
    if (const auto [other, channel] = *one; other < rank_)
      sockets_->connect(other, channel,
                        address_of(*resolve_endpoint(other, endpoints[static_cast<size_t>(other)])));

  std::set<int> ended;
  auto next_probe = Clock::now() + kProbeInterval;
  size_t probed = 0;
  Clock::time_point end_of_search{};
  while (!expected.empty()) {
    sockets_->advance(kWatchInterval);
    watch();
    std::erase_if(expected, [&](const auto& one) {
      FileDescriptor fd = sockets_->take(one.first, one.second);
      if (!fd) return false;
      const int host = hosts_.host_of(one.first);
      if (one.second == kBetweenHosts || both_alone(host)) {
        keep_alive(fd.get(), kHostTimeout);
        if (store_rank_ >= 0 && host == hosts_.host_of(store_rank_)) store_connection_ = fd.get();
      } else if (host != mine) {
        keep_open(fd.get());
      }
      (one.second == kBetweenHosts ? between_hosts_[static_cast<size_t>(host)]
                                   : connections_[static_cast<size_t>(one.first)]) = std::move(fd);
      return true;
    });
    // It listened before it published its address, so a rank that refuses has ended since. One that is to
    // connect to this one is asked by a connection that is closed again.
    for (const int other : sockets_->refused()) ended.insert(other);
    if (!expected.empty() && Clock::now() >= next_probe) {
      const int other = expected[probed++ % expected.size()].first;
      const Addresses address = resolve_endpoint(other, endpoints[static_cast<size_t>(other)]);
      if (!connect_to(*address, Clock::now() + kWatchInterval) && errno == ECONNREFUSED) ended.insert(other);
      if (probed % expected.size() == 0) next_probe = Clock::now() + kProbeInterval;
    }
    // Maybe it has ended because of another rank, so all are looked for.
    if (!ended.empty() && end_of_search == Clock::time_point{})
      end_of_search = Clock::now() + 5 * kWatchInterval;
    if (!ended.empty() && Clock::now() >= end_of_search) break;
    if (Clock::now() >= deadline && !expected.empty()) {
      const int other = expected[0].first;
      const int error = sockets_->last_error(other);
      throw unreachable(other, endpoints[static_cast<size_t>(other)],
                        describe_errno(error != 0 && error != ECONNRESET ? error : ETIMEDOUT));
    }
  }
  for (const FileDescriptor& connection : connections_)
    polled_.push_back({connection ? connection.get() : -1, POLLRDHUP, 0});
  for (const FileDescriptor& connection : between_hosts_)
    polled_.push_back({connection ? connection.get() : -1, POLLRDHUP, 0});
  if (ended.empty()) return;
  for (const int rank : gone()) ended.insert(rank);
  throw RankIsGone(std::vector<int>(ended.begin(), ended.end()));
}

std::unique_ptr<shm::PeerSockets> Liveness::share_between_hosts(const GroupStore& store,
                                                                milliseconds timeout) {
  const int mine = hosts_.host_of(rank_), index = hosts_.index_of(rank_);
  const std::vector<int>& ranks = hosts_.ranks_of(mine);
  if (ranks.size() == 1 || hosts_.is_one()) return nullptr;
  auto peers = std::make_unique<shm::PeerSockets>(store.under(str("host/", mine)), index, ranks, timeout);
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    if (host == mine) continue;
    FileDescriptor& connection = between_hosts_[static_cast<size_t>(host)];
    if (index == 0) {
      for (int other = 1; other < peers->size(); ++other) peers->send(other, connection.get(), host, timeout);
    } else {
      connection = peers->receive(0, timeout, [&] { store.check_all_alive(); }).fd;
      polled_[connections_.size() + static_cast<size_t>(host)].fd = connection.get();
      if (store_rank_ >= 0 && host == hosts_.host_of(store_rank_)) store_connection_ = connection.get();
    }
  }
  return peers;
}

void Liveness::stop_listening() { sockets_.reset(); }

bool Liveness::await_store() const {
  while (store_connection_ >= 0 && time_without_answer(store_connection_) > kQuietTime) {
    pollfd polled{store_connection_, POLLRDHUP, 0};
    if (::poll(&polled, 1, 0) > 0 && (polled.revents & kEnd) != 0) return false;
    std::this_thread::sleep_for(kWatchInterval);
  }
  return true;
}

std::vector<pollfd> Liveness::ask() const {
  std::vector<pollfd> polled = polled_;
  if (::poll(polled.data(), polled.size(), 0) <= 0) polled.clear();
  return polled;
}

std::vector<int> Liveness::gone() const {
  const std::vector<pollfd> polled = ask();
  if (polled.empty()) return {};
  std::set<int> ranks;
  for (size_t rank = 0; rank < connections_.size(); ++rank)
    if ((polled[rank].revents & kEnd) != 0) ranks.insert(static_cast<int>(rank));
  for (int host = 0; host < hosts_.num_hosts(); ++host)
    if ((polled[connections_.size() + static_cast<size_t>(host)].revents & kEnd) != 0)
      ranks.insert(hosts_.ranks_of(host).begin(), hosts_.ranks_of(host).end());
  return {ranks.begin(), ranks.end()};
}

std::vector<int> Liveness::silent() const {
  const std::vector<pollfd> polled = ask();
  if (polled.empty()) return {};
  std::vector<int> ranks;
  for (int host = 0; host < hosts_.num_hosts(); ++host) {
    const bool closed = (polled[connections_.size() + static_cast<size_t>(host)].revents & kEnd) != 0;
    for (const int rank : hosts_.ranks_of(host)) {
      const short its_own = polled[static_cast<size_t>(rank)].revents;
      // The end of a process is no error of the connection.
      if (closed ? (its_own & kEnd) == 0 : host != hosts_.host_of(rank_) && (its_own & POLLERR) != 0)
        ranks.push_back(rank);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

RankIsGone Liveness::error_of(std::vector<int> ranks) const {
  const std::vector<int> without_answer = silent();
  const bool all = std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return std::binary_search(without_answer.begin(), without_answer.end(), rank);
  });
  return RankIsGone(std::move(ranks), all ? RankIsGone::kHostIsSilent : RankIsGone::kConnectionClosed);
}

}  // namespace tessera::comm
