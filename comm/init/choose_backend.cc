#include "comm/init/choose_backend.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/store_exchange.h"
#include "comm/init/cuda_choice.h"
#include "comm/p2p/cuda_device.h"
#include "comm/p2p/host_device.h"
#include "comm/p2p/p2p.h"
#include "comm/shm/shared_memory.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// Probing a backend takes seconds at most: it makes no difference to how long ranks wait for each other.
constexpr milliseconds kProbeTimeout = std::chrono::seconds(30);
constexpr const char* kSeveralHosts = "the ranks are on several hosts, or in several network namespaces";

/// Collective. What every rank says, by rank. `place`: of this question in the store.
std::vector<std::string> ask_all(const Rendezvous& met, const Environment& env, std::string_view place,
                                 const std::string& mine, milliseconds timeout) {
  StoreExchange exchange(met.store.under(std::string(place)), env.rank, env.world_size);
  StoreExchange::Result result = exchange.run(mine, timeout, [] {});
  if (!result.missing.empty())
    throw CommError(str(name_ranks(result.missing), " left during the rendezvous"));
  if (result.values.empty())
    throw CommError(str("rank ", env.rank, " at the rendezvous (", place, "): ", result.cause));
  return std::move(result.values);
}

/// Collective. The first rank's obstacle; empty: no rank has one.
std::string first_obstacle(const Rendezvous& met, const Environment& env, std::string_view place,
                           const std::string& mine, milliseconds timeout) {
  const std::vector<std::string> all = ask_all(met, env, place, mine, timeout);
  for (int rank = 0; rank < env.world_size; ++rank)
    if (const std::string& theirs = all[static_cast<size_t>(rank)]; !theirs.empty())
      return str("rank ", rank, ": ", theirs);
  return "";
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
  return first_obstacle(met, env, "shm_probe", mine, timeout);
}

/// Rank 0 says why. `obstacle`: to shared memory.
Choice gloo_without_shared_memory(const Environment& env, const JoinOptions& options,
                                  const std::string& obstacle) {
  if (env.rank == 0)
    options.log.warning(str("ranks share a host, but not memory, and use Gloo, which is slower: ", obstacle));
  return {.backend = "gloo", .found = {}, .device = nullptr};
}

/// Collective. Ranks on several hosts, some of which share one.
Choice choose_between_hosts(const Rendezvous& met, const Environment& env, const JoinOptions& options) {
  const std::set<std::string> hosts(met.may_share.begin(), met.may_share.end());
  const bool nothing_to_share = hosts.size() == met.may_share.size();
  if (options.backend == "auto" && nothing_to_share)
    return {.backend = "gloo", .found = {}, .device = nullptr};
  FoundHosts found = find_hosts(met.store, env.rank, met.may_share, options.rendezvous_timeout);
  if (found.obstacle.empty()) {
    if (env.rank == 0)
      options.log.info(str("backend hybrid: ", env.world_size, " ranks on ", found.hosts->num_hosts(),
                           " hosts, shared memory within a host and Gloo between hosts"));
    return {.backend = "hybrid", .found = std::move(found), .device = nullptr};
  }
  if (options.backend != "auto") throw CommError(str("backend \"hybrid\" cannot be used: ", found.obstacle));
  return gloo_without_shared_memory(env, options, found.obstacle);
}

// ------------------------------------------------------------------------------------------------- CUDA

/// Collective. Why the ranks cannot map each other's device memory; empty if they can. Each step is one that
/// ends on all ranks: what a device has, what it can access, and a transport that is made and used.
std::string obstacle_to_p2p(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                            const std::vector<std::string>& uuids,
                            const std::shared_ptr<p2p::Device>& device) {
  if (!on_one_host(met)) {  // which all know, but none may end while another still connects
    ask_all(met, env, "p2p_hosts", "", options.rendezvous_timeout);
    return kSeveralHosts;
  }
  std::string mine;
  if (device->place().is_cuda()) {
    const std::string error = error_of([&] { mine = p2p::obstacle_on_cuda(device->place().index(), uuids); });
    if (!error.empty()) mine = error;
  }
  if (const std::string known = first_obstacle(met, env, "p2p_access", mine, options.rendezvous_timeout);
      !known.empty())
    return known;
  const auto limit = std::min(options.rendezvous_timeout, kProbeTimeout);
  const P2pOptions probe{
      .rank = env.rank, .size = env.world_size, .connect_timeout = limit, .device = device};
  const std::string failed = comm::obstacle_to_p2p(met.store.under("p2p_probe"), probe);
  return first_obstacle(met, env, "p2p_probe_result", failed, options.rendezvous_timeout);
}

/// Two ranks that have the same CUDA device.
std::optional<std::pair<size_t, size_t>> who_share(const std::vector<std::string>& uuids) {
  for (size_t rank = 0; rank < uuids.size(); ++rank)
    for (size_t other = rank + 1; other < uuids.size(); ++other)
      if (uuids[rank] == uuids[other]) return std::pair(rank, other);
  return std::nullopt;
}

/// Collective. "auto" is NCCL where NCCL can be used: p2p has not been measured beside it yet.
Choice choose_for_cuda(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                       at::Device device) {
  const at::DeviceIndex index = device.index();
  const std::vector<std::string> uuids =
      ask_all(met, env, "cuda_uuid", p2p::cuda_uuid(index), options.rendezvous_timeout);
  const auto sharing = who_share(uuids);
  std::string obstacle;
  if (options.backend == "p2p" || (options.backend == "auto" && sharing)) {
    const auto shared = p2p::make_cuda_device(index);
    obstacle = obstacle_to_p2p(met, env, options, uuids, shared);
    if (obstacle.empty()) return {.backend = "p2p", .found = {}, .device = shared};
    if (options.backend == "p2p") throw CommError(str("backend \"p2p\" cannot be used: ", obstacle));
  }
  // NCCL's own message for this comes from within a library and names no rank.
  if (sharing)
    throw CommError(str("ranks ", sharing->first, " and ", sharing->second,
                        " have the same CUDA device, which NCCL refuses: expected one for each rank, or ",
                        obstacle.empty()
                            ? "comm.backend \"p2p\", over which ranks of one host can share a device"
                            : str("backend \"p2p\", which cannot be used: ", obstacle)));
  return {.backend = "nccl", .found = {}, .device = nullptr};
}

}  // namespace

Choice choose_backend(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                      at::Device device) {
  if (device.is_cuda()) return choose_for_cuda(met, env, options, device);
  if (options.backend == "p2p") {  // JoinOptions::p2p_in_host_memory
    const auto host = p2p::make_host_device();
    const std::string obstacle = obstacle_to_p2p(met, env, options, {}, host);
    if (!obstacle.empty()) throw CommError(str("backend \"p2p\" cannot be used: ", obstacle));
    return {.backend = "p2p", .found = {}, .device = host};
  }
  if (options.backend == "gloo") return {.backend = "gloo", .found = {}, .device = nullptr};
  const bool one_host = on_one_host(met);
  if (!one_host && options.backend != "shm") return choose_between_hosts(met, env, options);
  const std::string obstacle =
      one_host ? obstacle_to_shared_memory(met, env, options.rendezvous_timeout) : kSeveralHosts;
  if (obstacle.empty()) return {.backend = "shm", .found = {}, .device = nullptr};
  if (options.backend != "auto")
    throw CommError(str("backend \"", options.backend, "\" cannot be used: ", obstacle));
  return gloo_without_shared_memory(env, options, obstacle);
}

}  // namespace tessera::comm
