#include "comm/liveness.h"

#include <cerrno>
#include <set>
#include <utility>

#include "comm/error_message.h"
#include "comm/tcp.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

CommError unreachable(int rank, const std::string& endpoint, const std::string& why) {
  return CommError(str(
      "rank ", rank, " cannot be reached at ", endpoint, " (", why,
      "): ranks need TCP connections to each other; GLOO_SOCKET_IFNAME names the network interface to use"));
}

}  // namespace

RankIsGone::RankIsGone(std::vector<int> ranks)
    : CommError(str(name_ranks(ranks), ranks.size() == 1 ? " is" : " are", " gone (connection closed)")),
      ranks_(std::move(ranks)) {}

Liveness::Liveness(const std::string& address) {
  const Addresses found = resolve_numeric(address, "0");
  listener_ = listen_at(found->ai_family, found->ai_addr, found->ai_addrlen);
  if (!listener_)
    throw CommError(str("no TCP port can be opened at ", address, " (", describe_connect_error(errno), ")"));
  endpoint_ = str(address, ' ', port_of(listener_.get()));
}

void Liveness::connect(const std::vector<std::string>& endpoints, int rank,
                       std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  connections_.resize(endpoints.size());
  polled_.assign(endpoints.size(), pollfd{-1, POLLRDHUP, 0});
  std::set<int> ended;
  for (size_t other = 0; other < endpoints.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    const size_t space = endpoints[other].find(' ');
    if (space == std::string::npos)
      throw unreachable(static_cast<int>(other), endpoints[other], "no address");
    const Addresses address =
        resolve_numeric(endpoints[other].substr(0, space), endpoints[other].substr(space + 1));
    connections_[other] = connect_to(*address, deadline);
    if (!connections_[other]) {
      // It listened before it published its address, so its process has ended since. Maybe because of another
      // rank that has, so all are looked for.
      if (errno == ECONNREFUSED) {
        ended.insert(static_cast<int>(other));
        continue;
      }
      throw unreachable(static_cast<int>(other), endpoints[other], describe_connect_error(errno));
    }
    keep_alive(connections_[other].get(), kHostTimeout);
    polled_[other].fd = connections_[other].get();
  }
  if (ended.empty()) return;
  for (const int rank : gone()) ended.insert(rank);
  throw RankIsGone(std::vector<int>(ended.begin(), ended.end()));
}

std::vector<int> Liveness::gone() const {
  std::vector<pollfd> polled = polled_;
  std::vector<int> ranks;
  if (::poll(polled.data(), polled.size(), 0) <= 0) return ranks;
  for (size_t rank = 0; rank < polled.size(); ++rank)
    if ((polled[rank].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0)
      ranks.push_back(static_cast<int>(rank));
  return ranks;
}

}  // namespace tessera::comm
