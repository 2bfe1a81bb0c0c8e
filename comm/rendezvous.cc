#include "comm/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "comm/error_message.h"
#include "comm/network.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// After a failure the store lasts this long, so that the ranks that wait can read why.
constexpr milliseconds kErrorTime{500};
/// Of what ranks write to the store: to be raised when a release changes it.
constexpr int kProtocolVersion = 4;

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// The time limit of the rendezvous. Logs what a wait is for when it takes long. Borrows the options.
class WaitLimit {
 public:
  explicit WaitLimit(const JoinOptions& options)
      : options_(options), deadline_(Clock::now() + options.rendezvous_timeout) {}
  milliseconds left() const {
    return std::max(std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()), milliseconds(1));
  }
  template <class Describe>
  void still_waiting(const Describe& describe) {
    if (options_.interrupt) options_.interrupt();
    if (Clock::now() < next_) return;
    next_ = Clock::now() + std::chrono::minutes(1);
    options_.log.info(
        str(describe(), "; gives up in ", std::chrono::ceil<std::chrono::seconds>(left()).count(), " s"));
  }

 private:
  const JoinOptions& options_;
  const Clock::time_point deadline_;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(5);
};

c10::intrusive_ptr<c10d::Store> open_store(const Environment& env, const std::string& host,
                                           milliseconds timeout, WaitLimit& limit) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.agent_store;
  options.waitWorkers = false;  // register_rank() does it, with names
  if (!options.isServer) {
    // TCPStore would wait without a limit for the answer of a server of another kind.
    const char* who = env.agent_store ? "torchrun's agent" : "rank 0";
    await_server(host, env.master_port, timeout, [&](const std::string& instead) {
      limit.still_waiting([&] {
        return str("rank ", env.rank, " waits for ", who, " to serve the rendezvous at ",
                   endpoint(host, env.master_port), " (", instead, ")");
      });
    });
  } else {
    if (env.store_fd >= 0) check_listening(env.store_fd);
    options.masterListenFd = env.store_fd >= 0 ? env.store_fd : listen_for_store(host, env.master_port);
    check_reachable(host, env.master_port);
  }
  options.timeout = limit.left();
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    set_timeout_of_connections_to(env.master_port, timeout);
    return store;
  } catch (const std::exception& error) {
    throw CommError(str("rank ", env.rank, " cannot join the rendezvous at ", endpoint(host, env.master_port),
                        " (", error_message(error), ")"));
  }
}

/// Tells the ranks that wait that there will be no group. Returns what to throw: the first such reason.
CommError refusal(const GroupStore& store, const std::string& why) {
  return CommError(store.claim("refused", why));
}

/// What a rank publishes of itself.
struct RankInfo {
  std::string domain, may_share, process, endpoint;
  Settings settings;

  std::string encode() const {
    std::string text = str(domain, '\n', may_share, '\n', process, '\n', endpoint, '\n');
    for (const auto& [name, value] : settings) text += str(name, '\t', value, '\n');
    return text;
  }

  static RankInfo decode(const std::string& text) {
    RankInfo info;
    std::istringstream lines(text);
    for (std::string* field : {&info.domain, &info.may_share, &info.process, &info.endpoint})
      std::getline(lines, *field);
    for (std::string line; std::getline(lines, line);) {
      const size_t tab = line.find('\t');
      if (tab != std::string::npos) info.settings[line.substr(0, tab)] = line.substr(tab + 1);
    }
    return info;
  }
};

void check_settings(const std::vector<RankInfo>& ranks) {
  for (const auto& [name, value] : ranks.front().settings)
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      const auto theirs = ranks[rank].settings.find(name);
      const std::string found = theirs == ranks[rank].settings.end() ? "not given" : theirs->second;
      if (found != value)
        throw CommError(
            str(name, " differs between ranks: it is ", value, " on rank 0 and ", found, " on rank ", rank));
    }
}

void await_all(const GroupStore& store, const Environment& env, milliseconds timeout, WaitLimit& limit) {
  const auto watch = [&] {
    if (store.has("refused")) throw CommError(store.get("refused"));
    limit.still_waiting([&] {
      std::vector<int> missing;
      for (int r = 0; r < env.world_size; ++r)
        if (!store.has(str("rank/", r))) missing.push_back(r);
      return str("rank ", env.rank, " waits at the rendezvous at ",
                 endpoint(env.master_addr, env.master_port), " for ", name_ranks(missing), " of ",
                 env.world_size);
    });
  };
  const std::vector<int> missing = store.await_ranks("rank/", env.world_size, limit.left(), watch);
  if (!missing.empty()) {
    throw refusal(store,
                  str(name_ranks(missing), " of ", env.world_size, missing.size() == 1 ? " has" : " have",
                      " not arrived at the rendezvous within ", name_duration(timeout)));
  }
}

/// Publishes `mine` and returns what all ranks publish.
std::vector<RankInfo> register_rank(const GroupStore& store, const Environment& env, const RankInfo& mine,
                                    milliseconds timeout, WaitLimit& limit) {
  const std::string claimed = store.claim("world", str(env.world_size, " on rank ", env.rank));
  if (claimed.substr(0, claimed.find(' ')) != std::to_string(env.world_size)) {
    throw refusal(store, str("WORLD_SIZE differs between ranks: it is ", env.world_size, " on rank ",
                             env.rank, " and ", claimed));
  }
  const RankInfo holder = RankInfo::decode(store.claim(str("rank/", env.rank), mine.encode()));
  if (holder.process != mine.process) {
    throw refusal(
        store, str("RANK=", env.rank, " is given to two processes: ", holder.process, " and ", mine.process));
  }
  await_all(store, env, timeout, limit);
  std::vector<RankInfo> ranks;
  for (const std::string& text : store.get_all("rank/", env.world_size))
    ranks.push_back(RankInfo::decode(text));
  return ranks;
}

/// Where the other ranks reach this one.
std::string own_address(const std::string& host, int port) {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (interfaces == nullptr || *interfaces == '\0') return address_towards(host, port);
  const std::string name = interfaces;
  return address_of_interface(name.substr(0, name.find(',')), str("GLOO_SOCKET_IFNAME=", name));
}

void connect_liveness(Liveness& liveness, const std::vector<RankInfo>& ranks, const Environment& env,
                      bool one_host, milliseconds timeout) {
  std::vector<std::string> endpoints;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::string& address = ranks[rank].endpoint;
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

Settings settings_of(const JoinOptions& options, at::Device device) {
  return {{"comm.backend", str('"', options.backend, '"')},
          {"comm.timeout_s", str(static_cast<double>(options.timeout.count()) / 1000)},
          {"the device of the tensors", device.is_cuda() ? "cuda" : "cpu"}};
}

Rendezvous rendezvous(const Environment& env, const JoinOptions& options, const Settings& settings) {
  const milliseconds timeout = options.rendezvous_timeout;
  // "localhost" may mean ::1 on one side and 127.0.0.1 on the other.
  const std::string host = env.master_addr == "localhost" ? "127.0.0.1" : env.master_addr;
  const std::string where =
      str(env.agent_store ? "torchrun's agent is gone: the store at " : "rank 0 is gone: its store at ",
          endpoint(host, env.master_port));
  WaitLimit limit(options);
  const auto liveness = std::make_shared<Liveness>(own_address(host, env.master_port));
  const std::string domain = loopback_domain();
  RankInfo mine{domain, options.host_for_tests ? str(domain, '/', options.host_for_tests(env.rank)) : domain,
                str("process ", getpid(), " on ", host_name()), liveness->endpoint(), settings};
  mine.settings["the version of what ranks say to each other"] = std::to_string(kProtocolVersion);
  // The agent's store outlives the ranks it restarts; torch keeps its attempts apart in the same way. A late
  // rank of an earlier attempt may find the store of the next one.
  const bool has_attempts = env.agent_store || env.restart_count > 0;
  const std::string prefix = has_attempts ? str("tessera/attempt_", env.restart_count) : "tessera";
  Rendezvous result{GroupStore(open_store(env, host, timeout, limit), where).under(prefix)};
  result.serves_store = env.rank == 0 && !env.agent_store;
  try {
    const std::vector<RankInfo> ranks = register_rank(result.store, env, mine, timeout, limit);
    check_settings(ranks);
    result.one_host = std::all_of(ranks.begin(), ranks.end(),
                                  [&](const RankInfo& rank) { return rank.domain == mine.domain; });
    for (const RankInfo& rank : ranks) result.may_share.push_back(rank.may_share);
    connect_liveness(*liveness, ranks, env, result.one_host, limit.left());
    result.store = result.store.watched(liveness);
  } catch (const CommError&) {
    if (result.serves_store) std::this_thread::sleep_for(kErrorTime);
    throw;
  }
  return result;
}

}  // namespace tessera::comm
