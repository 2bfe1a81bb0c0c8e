#include "comm/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <thread>

#include "comm/error_message.h"
#include "comm/network.h"
#include "comm/registration.h"
#include "comm/sealed_store.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// After a failure the store lasts this long, so that the ranks that wait can read why.
constexpr milliseconds kErrorTime{500};
/// Of what ranks write to the store: to be raised when a release changes it.
constexpr int kProtocolVersion = 5;

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

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

/// Collective. What ranks say from here on is sealed where they have a secret. [Note: the run's secret]
c10::intrusive_ptr<c10d::Store> sealed(c10::intrusive_ptr<c10d::Store> store, const std::string& prefix,
                                       const Environment& env, const std::string& where) {
  const std::string& secret = env.run_secret;
  const std::string mine = secret.empty() ? "none" : SealedStore::fingerprint(secret);
  const std::string theirs = GroupStore(store, where).under(prefix).claim("secret", mine);
  if (theirs != mine) {
    const bool both = !secret.empty() && theirs != "none";
    throw CommError(str("TESSERA_RUN_SECRET ",
                        secret.empty() ? "is not set"
                        : both         ? "differs"
                                       : "is set",
                        " on rank ", env.rank,
                        both             ? " from"
                        : secret.empty() ? ", but is on"
                                         : ", but not on",
                        " the rank that came first; expected the same value on all ranks"));
  }
  if (secret.empty()) return store;
  return c10::make_intrusive<SealedStore>(std::move(store), secret);
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
  WaitLimit limit(timeout, options.log, options.interrupt);
  const auto liveness = std::make_shared<Liveness>(own_address(host, env.master_port));
  const std::string domain = loopback_domain();
  RankInfo mine{domain, options.host_for_tests ? str(domain, '/', options.host_for_tests(env.rank)) : domain,
                str("process ", getpid(), " on ", host_name()), liveness->endpoint(), settings};
  mine.settings.try_emplace(kVersionSetting, std::to_string(kProtocolVersion));
  // The agent's store outlives the ranks it restarts; torch keeps its attempts apart in the same way. A late
  // rank of an earlier attempt may find the store of the next one.
  const bool has_attempts = env.agent_store || env.restart_count > 0;
  const std::string prefix = has_attempts ? str("tessera/attempt_", env.restart_count) : "tessera";
  const auto store = sealed(open_store(env, host, timeout, limit), prefix, env, where);
  Rendezvous result{GroupStore(store, where).under(prefix)};
  result.serves_store = env.rank == 0 && !env.agent_store;
  try {
    const std::vector<RankInfo> ranks = register_rank(result.store, env, mine, limit);
    result.one_host = std::all_of(ranks.begin(), ranks.end(),
                                  [&](const RankInfo& rank) { return rank.domain == mine.domain; });
    for (const RankInfo& rank : ranks) result.may_share.push_back(rank.may_share);
    connect_liveness(*liveness, ranks, env, result.one_host, limit.left());
    result.store = result.store.watched(liveness);
    // From here on a rank 0 that hangs is waited for as long as in a collective.
    set_timeout_of_connections_to(env.master_port, std::min(timeout, options.timeout));
  } catch (const CommError&) {
    if (result.serves_store) std::this_thread::sleep_for(kErrorTime);
    throw;
  }
  return result;
}

}  // namespace tessera::comm
