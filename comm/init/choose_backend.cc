#include "comm/init/choose_backend.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/store_exchange.h"
#include "comm/init/cuda_choice.h"
#include "comm/memory/cuda_host_transfer.h"
#include "comm/shm/shared_memory.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr const char* kSeveralHosts = "the ranks are on several hosts, or in several network namespaces";

/// `question`: its place in the store, and for messages.
StoreExchange exchange_of(const Rendezvous& met, const Environment& env, std::string_view question) {
  return {met.store.under(std::string(question)), env.rank, env.world_size};
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const std::exception& error) {
    return error_message(error);
  }
}

bool on_one_host(const Rendezvous& met) {
  return std::set<std::string>(met.may_share.begin(), met.may_share.end()).size() == 1;
}

/// Collective. Why the ranks cannot all have shared memory; empty if they can.
std::string obstacle_to_shared_memory(const Rendezvous& met, const Environment& env, milliseconds timeout) {
  const std::string mine = error_of([] { shm::SharedMemory::create(1 << 20); });
  return exchange_of(met, env, "shm_probe").first_obstacle(mine, timeout, "shm_probe");
}

/// Rank 0 says why. `obstacle`: to shared memory.
Choice gloo_without_shared_memory(const Environment& env, const JoinOptions& options,
                                  const std::string& obstacle) {
  if (env.rank == 0)
    options.log.warning(str("ranks share a host, but not memory, and use Gloo, which is slower: ", obstacle));
  return {.backend = "gloo"};
}

/// Collective. Ranks on several hosts, some of which share one.
Choice choose_between_hosts(const Rendezvous& met, const Environment& env, const JoinOptions& options) {
  const std::set<std::string> hosts(met.may_share.begin(), met.may_share.end());
  const bool nothing_to_share = hosts.size() == met.may_share.size();
  if (options.backend == "auto" && nothing_to_share) return {.backend = "gloo"};
  FoundHosts found = find_hosts(met.store, env.rank, met.may_share, options.rendezvous_timeout);
  if (found.obstacle.empty()) {
    if (env.rank == 0)
      options.log.info(str("backend hybrid: ", env.world_size, " ranks on ", found.hosts->num_hosts(),
                           " hosts, shared memory within a host and Gloo between hosts"));
    return {.backend = "hybrid", .found = std::move(found)};
  }
  if (options.backend != "auto") throw CommError("backend \"hybrid\" cannot be used: ", found.obstacle);
  return gloo_without_shared_memory(env, options, found.obstacle);
}

/// Collective. For CPU tensors.
Choice choose_for_cpu(const Rendezvous& met, const Environment& env, const JoinOptions& options) {
  if (options.backend == "gloo") return {.backend = "gloo"};
  const bool one_host = on_one_host(met);
  if (!one_host && options.backend != "shm") return choose_between_hosts(met, env, options);
  const std::string obstacle =
      one_host ? obstacle_to_shared_memory(met, env, options.rendezvous_timeout) : kSeveralHosts;
  if (obstacle.empty()) return {.backend = "shm"};
  if (options.backend != "auto")
    throw CommError("backend \"", options.backend, "\" cannot be used: ", obstacle);
  return gloo_without_shared_memory(env, options, obstacle);
}

/// Two ranks that have the same CUDA device.
std::optional<std::pair<size_t, size_t>> who_share(const std::vector<std::string>& uuids) {
  for (size_t rank = 0; rank < uuids.size(); ++rank)
    for (size_t other = rank + 1; other < uuids.size(); ++other)
      if (uuids[rank] == uuids[other]) return std::pair(rank, other);
  return std::nullopt;
}

/// Collective. Why CUDA tensors cannot go over NCCL; empty if they can.
std::string obstacle_to_nccl(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                             at::Device device) {
  const std::string mine = error_of([] { cuda_plugin_symbol("tessera_nccl_make_group"); });
  const std::string lacks =
      exchange_of(met, env, "nccl").first_obstacle(mine, options.rendezvous_timeout, "nccl");
  if (!lacks.empty()) return lacks;
  const auto sharing =
      who_share(exchange_of(met, env, "cuda_uuid")
                    .ask_all(cuda_uuid(device.index()), options.rendezvous_timeout, "cuda_uuid"));
  if (!sharing) return "";
  return str("ranks ", sharing->first, " and ", sharing->second,
             " have the same CUDA device, which NCCL refuses");
}

}  // namespace

Choice choose_backend(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                      at::Device device, std::shared_ptr<HostTransfer> transfer) {
  const bool by_name = options.backend == "staged";
  if (device.is_cpu() && !by_name) return choose_for_cpu(met, env, options);
  if (!by_name) {
    const std::string obstacle = obstacle_to_nccl(met, env, options, device);
    if (obstacle.empty()) return {.backend = "nccl"};
    // NCCL's own message comes from within a library and names no rank.
    if (options.backend == "nccl")
      throw CommError(obstacle,
                      ": expected one device for each rank, or comm.backend \"staged\", over which "
                      "ranks can share a device");
    if (env.rank == 0) options.log.warning(str("backend staged, which is slower than NCCL: ", obstacle));
  }
  JoinOptions on_host = options;
  on_host.backend = "auto";
  Choice choice = choose_for_cpu(met, env, on_host);
  choice.transfer = transfer ? std::move(transfer) : make_cuda_host_transfer(device, /*pin_memory=*/true);
  if (env.rank == 0 && by_name)
    options.log.info(str("backend staged: tensors pass through the host's memory, over ", choice.backend));
  return choice;
}

}  // namespace tessera::comm
