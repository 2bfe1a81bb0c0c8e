#include "comm/init/init.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "comm/control/error_message.h"
#include "comm/gloo/gloo.h"
#include "comm/hybrid/hybrid.h"
#include "comm/init/choose_backend.h"
#include "comm/init/cuda_choice.h"
#include "comm/init/group_context.h"
#include "comm/init/self.h"
#include "comm/init/transport_communicator.h"
#include "comm/nccl/nccl.h"
#include "comm/p2p/host_device.h"
#include "comm/p2p/p2p.h"
#include "comm/rendezvous/network.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/shm/shm.h"
#include "comm/sockets/open_files.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// [Note: libtorch's settings] Three process-wide settings are changed unless the user has set them:
//  - c10d logs every retry of a connection on stderr; only errors remain (TORCH_CPP_LOG_LEVEL).
//  - Its flight recorder notes each collective in a map that groups on several threads write to without a
//    lock, and for an all-gather allocates a full-size buffer only to note its shape; it is turned off
//    (TORCH_FR_BUFFER_SIZE). Our FlightRecorder keeps what is needed.
//  - Gloo and the store's client write to connections whose other end may be gone, and rely on what Python
//  does
//    for its programs: SIGPIPE is ignored, so that the write fails with an error instead of ending the
//    process.
// All must happen before the first process group, and while no other thread reads the environment.
void prepare_libtorch() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  struct sigaction pipe{};
  if (sigaction(SIGPIPE, nullptr, &pipe) == 0 && pipe.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

GlooOptions gloo_options(const Environment& env, const JoinOptions& options, bool one_host) {
  GlooOptions gloo{.rank = env.rank,
                   .size = env.world_size,
                   .verify = options.verify,
                   .timeout = options.timeout,
                   .log = options.log};
  // All ranks have just been at the rendezvous: connecting takes less than a second, or never ends.
  gloo.connect_timeout = std::min<milliseconds>(options.rendezvous_timeout, std::chrono::seconds(20));
  if (const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
      interfaces != nullptr && *interfaces != '\0') {
    gloo.interfaces = interfaces;
  } else if (!one_host) {
    gloo.address = address_towards(env.master_addr, env.master_port);
  }
  return gloo;
}

/// Collective.
CommunicatorPtr connect(const Rendezvous& met, const Environment& env, const JoinOptions& options,
                        at::Device device, std::shared_ptr<GroupContext> context) {
  const Choice choice = choose_backend(met, env, options, device);
  const MakeTransport make = [&](const GroupStore& store,
                                 FailureHook on_failure) -> std::unique_ptr<Transport> {
    if (choice.backend == "shm")
      return make_shm_transport(store, {.rank = env.rank,
                                        .size = env.world_size,
                                        .timeout = options.timeout,
                                        .connect_timeout = options.rendezvous_timeout});
    if (choice.backend == "nccl") return make_nccl_transport(store, env, device.index(), options.timeout);
    if (choice.backend == "p2p")
      return make_p2p_transport(store,
                                {.rank = env.rank,
                                 .size = env.world_size,
                                 .timeout = options.timeout,
                                 .connect_timeout = options.rendezvous_timeout,
                                 .device = choice.device},
                                std::move(on_failure));
    const GlooOptions gloo = gloo_options(env, options, met.one_host);
    if (choice.backend == "hybrid")
      return make_hybrid_transport(store, choice.found, gloo, std::move(on_failure));
    return make_gloo_transport(store, gloo, std::move(on_failure));
  };
  return std::make_shared<TransportCommunicator>(std::move(context), options.timeout, make, device);
}

}  // namespace

at::Device choose_device(const JoinOptions& options, const Environment& env) {
  const std::string &backend = options.backend, &device = options.device;
  constexpr std::array kBackends{"auto", "shm", "hybrid", "gloo", "nccl", "p2p"};
  if (std::find(kBackends.begin(), kBackends.end(), backend) == kBackends.end())
    throw CommError(str("unknown backend \"", backend,
                        "\": expected \"auto\", \"shm\", \"hybrid\", \"gloo\", \"nccl\" or \"p2p\""));
  if (device != "auto" && device != "cpu" && device != "cuda")
    throw CommError(str("unknown device \"", device, "\": expected \"auto\", \"cpu\" or \"cuda\""));
  const bool moves_cpu_tensors = backend == "shm" || backend == "hybrid" || backend == "gloo";
  if (moves_cpu_tensors && device == "cuda")
    throw CommError(
        str("backend \"", backend, "\" moves CPU tensors; CUDA tensors need \"p2p\" or \"nccl\""));
  if (device == "cuda" || (device == "auto" && !moves_cpu_tensors)) {
    try {
      const int index = choose_cuda_device(cuda_devices(), env.local_rank, env.local_world_size,
                                           /*may_share=*/backend == "p2p");
      return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
    } catch (const Error&) {
      if (device == "cuda") throw;
    }
  }
  if (backend == "nccl" || (backend == "p2p" && !options.p2p_in_host_memory))
    throw CommError(str("backend \"", backend,
                        "\" moves CUDA tensors; CPU tensors need \"shm\", \"hybrid\" or \"gloo\""));
  return at::kCPU;
}

CommunicatorPtr join(const JoinOptions& given, const Environment& env) {
  JoinOptions options = given;
  options.rendezvous_timeout = env.rendezvous_timeout.value_or(given.rendezvous_timeout);
  TESSERA_CHECK(env.rank >= 0 && env.rank < env.world_size, "rank ", env.rank, " of ", env.world_size);
  prepare_libtorch();
  const at::Device device = choose_device(options, env);
  if (device.is_cuda()) set_cuda_device(device.index());
  if (env.world_size == 1)
    return std::make_shared<SelfCommunicator>(SimulatedGroup{.timeout = options.timeout, .device = device});
  check_open_files(env.world_size, env.rank == 0 && !env.agent_store, options.backend);
  const Rendezvous met = rendezvous(env, options, settings_of(options, device));
  auto context = std::make_shared<GroupContext>(met.store, env.rank, env.world_size, met.serves_store,
                                                options.interrupt, options.on_block);
  try {
    return connect(met, env, options, device, std::move(context));
  } catch (const RankIsGone& error) {
    std::set<int> gone(error.ranks().begin(), error.ranks().end());
    for (const int rank : met.store.gone()) gone.insert(rank);
    throw RankIsGone(std::vector<int>(gone.begin(), gone.end()));
  } catch (const StoreIsGone&) {  // rank 0 may have ended because of another
    if (const std::vector<int> gone = met.store.gone(); gone.size() > 1) throw RankIsGone(gone);
    throw;
  }
}
void run_threads(int world_size, const JoinOptions& options,
                 const std::function<void(CommunicatorPtr)>& body) {
  TESSERA_CHECK(world_size >= 1, world_size, " ranks");
  TESSERA_CHECK(options.device == "cpu", "ranks as threads are for CPU tensors");
  if (world_size == 1) return body(std::make_shared<SelfCommunicator>(options.timeout));
  prepare_libtorch();
  const GroupStore store(c10::make_intrusive<c10d::HashStore>(), "the threads' store");
  std::vector<std::string> hosts;
  for (int rank = 0; rank < world_size; ++rank)
    hosts.push_back(options.host_for_tests ? options.host_for_tests(rank)
                                           : str(2 * rank < world_size ? "first" : "second"));
  const bool one_host = std::set<std::string>(hosts.begin(), hosts.end()).size() == 1;
  std::mutex mutex;
  std::exception_ptr first_error, first_comm_error;
  const auto run = [&](int rank) {
    std::shared_ptr<TransportCommunicator> comm;
    const auto fail = [&](std::exception_ptr& first) {
      const std::exception_ptr error = std::current_exception();
      {
        const std::lock_guard lock(mutex);
        if (!first) first = error;
      }
      if (comm) comm->abort(error_message(error));
    };
    try {
      const MakeTransport make = [&](const GroupStore& group_store,
                                     FailureHook on_failure) -> std::unique_ptr<Transport> {
        if (options.backend == "shm" || (options.backend == "hybrid" && one_host))
          return make_shm_transport(group_store, {.rank = rank,
                                                  .size = world_size,
                                                  .timeout = options.timeout,
                                                  .connect_timeout = options.rendezvous_timeout});
        if (options.backend == "p2p")
          return make_p2p_transport(group_store,
                                    {.rank = rank,
                                     .size = world_size,
                                     .timeout = options.timeout,
                                     .connect_timeout = options.rendezvous_timeout,
                                     .device = p2p::make_host_device()},
                                    std::move(on_failure));
        const GlooOptions gloo{.rank = rank,
                               .size = world_size,
                               .verify = options.verify,
                               .timeout = options.timeout,
                               .connect_timeout = options.rendezvous_timeout};
        if (options.backend == "hybrid")
          return make_hybrid_transport(group_store,
                                       find_hosts(group_store, rank, hosts, options.rendezvous_timeout), gloo,
                                       std::move(on_failure));
        return make_gloo_transport(group_store, gloo, std::move(on_failure));
      };
      comm = std::make_shared<TransportCommunicator>(
          std::make_shared<GroupContext>(store, rank, world_size, /*serves_store=*/false, options.interrupt,
                                         options.on_block),
          options.timeout, make);
      body(comm);
    } catch (const CommError&) {
      fail(first_comm_error);
    } catch (...) {
      fail(first_error);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
  if (first_comm_error) std::rethrow_exception(first_comm_error);
}

}  // namespace tessera::comm
