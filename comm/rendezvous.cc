#include "comm/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "comm/c10_words.h"
#include "comm/explain.h"
#include "comm/network.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLinger{500};
/// What ranks say to each other: to be raised when a release says it in another way.
constexpr int kProtocol = 2;

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// Says what a wait is for, once it has lasted.
class Patience {
 public:
  Patience(milliseconds timeout, const Logger& log) : log_(log), deadline_(Clock::now() + timeout) {}
  milliseconds left() const {
    return std::max(std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()), milliseconds(1));
  }
  template <class Describe>
  void still_waiting(const Describe& describe) {
    if (Clock::now() < next_) return;
    next_ = Clock::now() + std::chrono::minutes(1);
    log_.info(
        str(describe(), "; gives up in ", std::chrono::ceil<std::chrono::seconds>(left()).count(), " s"));
  }

 private:
  const Logger& log_;
  const Clock::time_point deadline_;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(5);
};

c10::intrusive_ptr<c10d::Store> open_store(const Environment& env, const std::string& host,
                                           milliseconds timeout, Patience& patience) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.agent_store;
  options.waitWorkers = false;  // register_rank() does it, with names
  if (!options.isServer) {
    // TCPStore would wait without a limit for the answer of a server of another kind.
    const char* who = env.agent_store ? "torchrun's agent" : "rank 0";
    await_server(host, env.master_port, timeout, [&](const std::string& instead) {
      patience.still_waiting([&] {
        return str("rank ", env.rank, " waits for ", who, " to serve the rendezvous at ",
                   endpoint(host, env.master_port), " (", instead, ")");
      });
    });
  } else {
    if (env.store_fd >= 0) check_listening(env.store_fd);
    options.masterListenFd = env.store_fd >= 0 ? env.store_fd : listen_for_store(host, env.master_port);
    check_reachable(host, env.master_port);
  }
  options.timeout = patience.left();
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    limit_connections_to(env.master_port, timeout);
    return store;
  } catch (const std::exception& error) {
    throw CommError(str("rank ", env.rank, " cannot join the rendezvous at ", endpoint(host, env.master_port),
                        " (", words_of(error), ")"));
  }
}

/// Tells the ranks that wait that the group cannot come about. Returns what to throw: the first such word.
CommError refusal(const GroupStore& store, const std::string& why) {
  return CommError(store.claim("refused", why));
}

/// What a rank says of itself when it comes.
struct Card {
  std::string domain, process, endpoint;
  Terms terms;

  std::string encode() const {
    std::string text = str(domain, '\n', process, '\n', endpoint, '\n');
    for (const auto& [name, value] : terms) text += str(name, '\t', value, '\n');
    return text;
  }

  static Card decode(const std::string& text) {
    Card card;
    std::istringstream lines(text);
    std::getline(std::getline(std::getline(lines, card.domain), card.process), card.endpoint);
    for (std::string line; std::getline(lines, line);) {
      const size_t tab = line.find('\t');
      if (tab != std::string::npos) card.terms.emplace_back(line.substr(0, tab), line.substr(tab + 1));
    }
    return card;
  }

  std::string term(const std::string& name) const {
    for (const auto& [known, value] : terms)
      if (known == name) return value;
    return "not given";
  }
};

void check_terms(const std::vector<Card>& cards) {
  for (const auto& [name, value] : cards.front().terms)
    for (size_t rank = 1; rank < cards.size(); ++rank)
      if (cards[rank].term(name) != value)
        throw CommError(str(name, " differs between ranks: it is ", value, " on rank 0 and ",
                            cards[rank].term(name), " on rank ", rank));
}

void await_all(const GroupStore& store, const Environment& env, milliseconds timeout, Patience& patience) {
  const auto watch = [&] {
    if (store.has("refused")) throw CommError(store.get("refused"));
    patience.still_waiting([&] {
      std::vector<int> missing;
      for (int r = 0; r < env.world_size; ++r)
        if (!store.has(str("rank/", r))) missing.push_back(r);
      return str("rank ", env.rank, " waits at the rendezvous at ",
                 endpoint(env.master_addr, env.master_port), " for ", name_ranks(missing), " of ",
                 env.world_size);
    });
  };
  const std::vector<int> missing = store.await_ranks("rank/", env.world_size, patience.left(), watch);
  if (!missing.empty()) {
    throw refusal(store,
                  str(name_ranks(missing), " of ", env.world_size, missing.size() == 1 ? " has" : " have",
                      " not arrived at the rendezvous within ", name_duration(timeout)));
  }
}

/// Returns what all ranks have said of themselves.
std::vector<Card> register_rank(const GroupStore& store, const Environment& env, const Card& mine,
                                milliseconds timeout, Patience& patience) {
  const std::string claimed = store.claim("world", str(env.world_size, " on rank ", env.rank));
  if (claimed.substr(0, claimed.find(' ')) != std::to_string(env.world_size)) {
    throw refusal(store, str("WORLD_SIZE differs between ranks: it is ", env.world_size, " on rank ",
                             env.rank, " and ", claimed));
  }
  const Card holder = Card::decode(store.claim(str("rank/", env.rank), mine.encode()));
  if (holder.process != mine.process) {
    throw refusal(
        store, str("RANK=", env.rank, " is given to two processes: ", holder.process, " and ", mine.process));
  }
  await_all(store, env, timeout, patience);
  std::vector<Card> cards;
  for (int r = 0; r < env.world_size; ++r) cards.push_back(Card::decode(store.get(str("rank/", r))));
  return cards;
}

/// Where the other ranks reach this one.
std::string own_address(const std::string& host, int port) {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (interfaces == nullptr || *interfaces == '\0') return address_towards(host, port);
  const std::string name = interfaces;
  return address_of_interface(name.substr(0, name.find(',')), str("GLOO_SOCKET_IFNAME=", name));
}

/// Connects to all other ranks.
void watch_over(Liveness& liveness, const std::vector<Card>& cards, const Environment& env, bool one_host,
                milliseconds timeout) {
  std::vector<std::string> endpoints;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const std::string& address = cards[rank].endpoint;
    if (!one_host && is_loopback(address.substr(0, address.find(' '))))
      throw CommError(str("MASTER_ADDR=", env.master_addr, " is ", address.substr(0, address.find(' ')),
                          " on rank ", rank,
                          "'s host, which ranks on other hosts cannot reach: give an address that is the "
                          "same everywhere, or set "
                          "GLOO_SOCKET_IFNAME"));
    endpoints.push_back(address);
  }
  liveness.connect(endpoints, env.rank, timeout);
}

}  // namespace

Terms terms_of(const Options& options) {
  return {{"comm.backend", str('"', options.backend, '"')},
          {"comm.timeout_s", str(static_cast<double>(options.timeout.count()) / 1000)},
          {"the device of the tensors", options.cuda ? "cuda" : "cpu"}};
}

Meeting meet(const Environment& env, milliseconds timeout, const Terms& terms, const Logger& log) {
  // "localhost" may mean ::1 on one side and 127.0.0.1 on the other.
  const std::string host = env.master_addr == "localhost" ? "127.0.0.1" : env.master_addr;
  const std::string where =
      str(env.agent_store ? "torchrun's agent is gone: the store at " : "rank 0 is gone: its store at ",
          endpoint(host, env.master_port));
  Patience patience(timeout, log);
  const auto liveness = std::make_shared<Liveness>(own_address(host, env.master_port));
  Card mine{loopback_domain(), str("process ", getpid(), " on ", host_name()), liveness->endpoint(), terms};
  mine.terms.emplace_back("the version of what ranks say to each other", std::to_string(kProtocol));
  // The agent's store outlives the ranks it restarts; torch keeps its attempts apart in the same way.
  const std::string prefix = env.agent_store ? str("tessera/attempt_", env.restart_count) : "tessera";
  Meeting meeting{GroupStore(open_store(env, host, timeout, patience), where).under(prefix)};
  meeting.serves = env.rank == 0 && !env.agent_store;
  try {
    const std::vector<Card> cards = register_rank(meeting.store, env, mine, timeout, patience);
    check_terms(cards);
    meeting.one_host =
        std::all_of(cards.begin(), cards.end(), [&](const Card& card) { return card.domain == mine.domain; });
    watch_over(*liveness, cards, env, meeting.one_host, patience.left());
    meeting.store = meeting.store.watched(liveness);
  } catch (const CommError&) {
    // The store must last until those who wait have asked again (GroupStore::await_ranks).
    if (meeting.serves) std::this_thread::sleep_for(kLinger);
    throw;
  }
  return meeting;
}

}  // namespace tessera::comm
