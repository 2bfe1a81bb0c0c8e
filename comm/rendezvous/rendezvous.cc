#include "comm/rendezvous/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <set>
#include <thread>

#include "comm/control/error_message.h"
#include "comm/control/peer_sockets.h"
#include "comm/control/store_exchange.h"
#include "comm/rendezvous/network.h"
#include "comm/rendezvous/registration.h"
#include "comm/rendezvous/session.h"
#include "core/environment/environment.h"
#include "core/error.h"
#include "core/host_name.h"
#include "core/random_digits.h"
#include "core/str.h"
#include "core/variables.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// After a failure the store lasts this long, so that the ranks that wait can read why.
constexpr milliseconds kErrorTime{500};
/// Counts versions of what ranks write to the store: a release that changes it raises it.
constexpr int kProtocolVersion = 7;

struct OpenStore {
  c10::intrusive_ptr<c10d::Store> store;
  std::set<int> connections;  ///< the store's
};

OpenStore open_store(const Environment& env, const std::string& host, milliseconds timeout,
                     WaitLimit& limit) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.agent_store;
  options.waitWorkers = false;  // register_rank() does it, with names
  if (!options.isServer) {
    // TCPStore would wait without a limit for the answer of a server of another kind.
    const char* who = env.agent_store ? "torchrun's agent" : "rank 0";
    await_server(host, env.master_port, timeout, [&](const std::string& instead) {
      check_rank_0_runs(env);
      limit.still_waiting([&] {
        return str("rank ", env.rank, " waits for ", who, " to serve the rendezvous at ",
                   endpoint(host, env.master_port), " (", instead, ")");
      });
    });
  } else {
    options.masterListenFd = listen_for_store(host, env.master_port);
    check_reachable(host, env.master_port);
  }
  options.timeout = limit.left();
  try {
    const std::set<int> before = connections_to(env.master_port);
    OpenStore opened{c10::make_intrusive<c10d::TCPStore>(host, options), connections_to(env.master_port)};
    for (const int other : before) opened.connections.erase(other);
    limit_waits(opened.connections, timeout);
    return opened;
  } catch (const std::exception& error) {
    throw CommError("rank ", env.rank, " cannot join the rendezvous at ", endpoint(host, env.master_port),
                    " (", error_message(error), ")");
  }
}

/// Where the other ranks reach this one.
std::string own_address(const std::string& host, int port) {
  const auto names = text_variable("GLOO_SOCKET_IFNAME");
  if (!names) return address_towards(host, port);
  return address_of_interface(names->substr(0, names->find(',')), str("GLOO_SOCKET_IFNAME=", *names));
}

/// Collective. Ends when all ranks are connected to all.
void connect_all(const std::shared_ptr<Liveness>& liveness, const std::vector<RankInfo>& ranks,
                 const Environment& env, bool one_host, const GroupStore& store, WaitLimit& limit,
                 const std::function<void()>& watch) {
  std::vector<std::string> endpoints, domains;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::string& address = ranks[rank].endpoint;
    if (!one_host && is_loopback(address.substr(0, address.find(' '))))
      throw CommError("MASTER_ADDR=", env.master_addr, " is ", address.substr(0, address.find(' ')),
                      " on rank ", rank,
                      "'s host, which ranks on other hosts cannot reach: give an address that is the "
                      "same everywhere, or set "
                      "GLOO_SOCKET_IFNAME");
    endpoints.push_back(address);
    domains.push_back(ranks[rank].domain);
  }
  liveness->connect(endpoints, Hosts(domains), limit.left(), watch);
  const GroupStore watched = store.watched(liveness);
  const auto on_host = liveness->share_between_hosts(watched.under("liveness"), limit.left());
  StoreExchange exchange(watched.under("connected"), env.rank, env.world_size);
  const StoreExchange::Result result = exchange.run("", limit.left(), watch);
  if (!result.missing.empty())
    throw CommError(name_ranks(result.missing), result.missing.size() == 1 ? " has" : " have",
                    " not connected to the other ranks within ", name_duration(limit.timeout()));
  if (result.values.empty()) result.fail(result.cause);
  liveness->stop_listening();
}

}  // namespace

Settings settings_of(const JoinOptions& options, at::Device device) {
  return {{"comm.backend", str('"', options.backend, '"')},
          {"comm.timeout_s", str(static_cast<double>(options.timeout.count()) / 1000)},
          {"comm.verify", options.verify ? "true" : "false"},
          {"the device of the tensors", device.is_cuda() ? "cuda" : "cpu"}};
}

Rendezvous rendezvous(const Environment& env, const JoinOptions& options, const Settings& settings,
                      const std::string& given_host) {
  const milliseconds timeout = options.rendezvous_timeout;
  // "localhost" may mean ::1 on one side and 127.0.0.1 on the other.
  const std::string host = env.master_addr == "localhost" ? "127.0.0.1" : env.master_addr;
  const std::string where =
      str(env.agent_store ? "torchrun's agent is gone: the store at " : "rank 0 is gone: its store at ",
          endpoint(host, env.master_port));
  const std::string address = own_address(host, env.master_port);
  std::function<void()> while_registering;
  const auto interrupt = [&] {
    if (options.interrupt) options.interrupt();
    if (while_registering) while_registering();
  };
  WaitLimit limit(timeout, options.log, interrupt);
  // The agent's store outlives the ranks it restarts; torch keeps its attempts apart in the same way. A late
  // rank of an earlier attempt may find the store of the next one.
  const bool has_attempts = env.agent_store || env.restart_count > 0;
  const std::string prefix = has_attempts ? str("tessera/attempt_", env.restart_count) : "tessera";
  const auto [plain_store, connections] = open_store(env, host, timeout, limit);
  Session session = join_session(plain_store, prefix, where, env, limit);
  Rendezvous result{session.store};
  result.serves_store = env.rank == 0 && !env.agent_store;
  try {
    const auto liveness = std::make_shared<Liveness>(
        address, env.rank, result.store.claim("liveness_key", random_digits(16)), env.agent_store ? -1 : 0);
    const GroupStore plain = GroupStore(plain_store, where).under(prefix);
    while_registering = [&] {
      if (env.run_secret.empty() && env.rank != 0) check_secret(plain, env);  // rank 0 may come later
      liveness->admit();
    };
    const std::string domain = loopback_domain();
    RankInfo mine{domain, given_host.empty() ? domain : str(domain, '/', given_host),
                  str("process ", getpid(), " on ", host_name()), liveness->endpoint(), settings};
    mine.settings.try_emplace(kVersionSetting, std::to_string(kProtocolVersion));
    const std::vector<RankInfo> ranks = register_rank(result.store, env, mine, limit);
    while_registering = nullptr;
    session.answers = {};
    result.one_host = std::all_of(ranks.begin(), ranks.end(),
                                  [&](const RankInfo& rank) { return rank.domain == mine.domain; });
    for (const RankInfo& rank : ranks) result.may_share.push_back(rank.may_share);
    connect_all(liveness, ranks, env, result.one_host, result.store, limit, interrupt);
    result.store = result.store.watched(liveness);
    // From here on a rank 0 that hangs is waited for as long as in a collective.
    limit_waits(connections, std::min(timeout, options.timeout));
  } catch (const CommError&) {
    if (result.serves_store) std::this_thread::sleep_for(kErrorTime);
    throw;
  }
  return result;
}

}  // namespace tessera::comm
