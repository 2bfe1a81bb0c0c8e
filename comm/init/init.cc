#include "comm/init/init.h"

#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <array>
#include <csignal>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "comm/control/error_message.h"
#include "comm/gloo/gloo.h"
#include "comm/hybrid/hybrid.h"
#include "comm/init/choose_backend.h"
#include "comm/init/cuda_choice.h"
#include "comm/init/given_machine.h"
#include "comm/init/group_context.h"
#include "comm/init/self.h"
#include "comm/init/transport_communicator.h"
#include "comm/nccl/nccl.h"
#include "comm/rendezvous/network.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/sockets/open_files.h"
#include "comm/staged/staged.h"
#include "core/check.h"
#include "core/environment/environment.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "core/variables.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// [Note: libtorch's settings] Three process-wide settings are changed unless the user has set them:
//  - c10d logs every retry of a connection on stderr; only errors remain (TORCH_CPP_LOG_LEVEL).
//  - Its flight recorder notes each collective in a map that groups on several threads write to without a
//    lock, and for an all-gather allocates a full-size buffer only to note its shape; it is turned off
//    (TORCH_FR_BUFFER_SIZE). Our FlightRecorder keeps what is needed.
//  - Gloo and the store's client write to connections whose other end may be gone, and rely on what
//    Python does for its programs: SIGPIPE is ignored, so that the write fails with an error instead of
//    ending the process.
// All must happen before the first process group, and while no other thread reads the environment.
//
// A vector function of MKL is called once, after which first calls of others are right, too: where two
// threads make a process's first call of one (exp, tanh …) at the same time, one of the two calls is
// sometimes computed with half of the digits (seen with torch 2.11 and 2.15: tanh was 5e-5 off in 1 process
// of 40). Ranks that are threads, or a data loader's thread beside the model, may be two such threads.
void prepare_libtorch() {
  at::tanh(at::zeros({1}, at::kFloat));
  if (!text_variable("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  set_default_variable("TORCH_FR_BUFFER_SIZE", "0");
  struct sigaction pipe{};
  if (sigaction(SIGPIPE, nullptr, &pipe) == 0 && pipe.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

/// Of ranks that are threads.
GlooOptions gloo_options(const Environment& env, const JoinOptions& options) {
  return {.rank = env.rank,
          .names = all_ranks(env.world_size),
          .verify = options.verify,
          .timeout = options.timeout,
          .connect_timeout = options.rendezvous_timeout,
          .log = options.log};
}

/// Of processes.
GlooOptions gloo_options(const Environment& env, const JoinOptions& options, bool one_host) {
  GlooOptions gloo = gloo_options(env, options);
  // All ranks have just been at the rendezvous: connecting takes less than a second, or never ends.
  gloo.connect_timeout = std::min<milliseconds>(options.rendezvous_timeout, std::chrono::seconds(20));
  if (const auto interfaces = text_variable("GLOO_SOCKET_IFNAME")) {
    gloo.interfaces = *interfaces;
  } else if (!one_host) {
    gloo.address = address_towards(env.master_addr, env.master_port);
  }
  return gloo;
}

/// Collective. `gloo`: rank, size and timeout are those of any transport.
std::unique_ptr<Transport> make_transport(const Choice& choice, const GroupStore& store,
                                          const GlooOptions& gloo, const JoinOptions& options,
                                          at::Device device, FailureHook on_failure) {
  if (choice.backend == "nccl")
    return make_nccl_transport(store, gloo.rank, gloo.size(), device.index(), gloo.timeout);
  std::unique_ptr<Transport> made;
  if (choice.backend == "gloo") {
    made = make_gloo_transport(store, gloo, on_failure);
  } else {
    const bool is_one_host = choice.backend == "shm";
    GlooOptions group = gloo;
    if (is_one_host) group.connect_timeout = options.rendezvous_timeout;  // of a split(), too
    made = make_hybrid_transport(
        store,
        is_one_host ? connect_hosts(store, std::make_shared<Hosts>(std::vector<int>(gloo.names.size())),
                                    gloo.rank, gloo.names, group.connect_timeout)
                    : choice.found,
        group, on_failure);
  }
  if (!choice.transfer) return made;
  return make_staged_transport(std::move(made), gloo.rank, device, choice.transfer, std::move(on_failure));
}

/// Collective. Chooses what carries the collectives of ranks that have met, and connects them.
std::shared_ptr<TransportCommunicator> open_group(const std::shared_ptr<GroupContext>& context,
                                                  const Rendezvous& met, const Environment& env,
                                                  const GlooOptions& gloo, const JoinOptions& options,
                                                  at::Device device, const GivenMachine& given) {
  const bool device_is_given = options.backend == "staged" && given.transfer;
  const Choice choice =
      choose_backend(met, env, options, device, device_is_given ? given.transfer(env.rank) : nullptr);
  const MakeTransport make = [&](const GroupStore& store, FailureHook on_failure) {
    return make_transport(choice, store, gloo, options, device, std::move(on_failure));
  };
  return std::make_shared<TransportCommunicator>(context, options.timeout, make, device);
}

}  // namespace

at::Device choose_device(const JoinOptions& options, const Environment& env) {
  const std::string &backend = options.backend, &device = options.device;
  constexpr std::array kBackends{"auto", "shm", "hybrid", "gloo", "nccl", "staged"};
  if (std::find(kBackends.begin(), kBackends.end(), backend) == kBackends.end())
    throw CommError("unknown backend \"", backend,
                    "\": expected \"auto\", \"shm\", \"hybrid\", \"gloo\", \"nccl\" or \"staged\"");
  if (device != "auto" && device != "cpu" && device != "cuda")
    throw CommError("unknown device \"", device, "\": expected \"auto\", \"cpu\" or \"cuda\"");
  const bool moves_cpu_tensors = backend == "shm" || backend == "hybrid" || backend == "gloo";
  if (moves_cpu_tensors && device == "cuda")
    throw CommError("backend \"", backend, "\" moves CPU tensors; CUDA tensors need \"nccl\" or \"staged\"");
  if (device == "cuda" || (device == "auto" && !moves_cpu_tensors)) {
    bool some_device = false;
    try {
      const CudaDevices devices = cuda_devices();
      some_device = devices.num_visible > 0;
      const bool may_share = backend == "staged" || (backend == "auto" && device == "cuda");
      const int index = choose_cuda_device(devices, env.local_rank, env.local_world_size, may_share);
      return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
    } catch (const Error& error) {
      if (device == "cuda") throw;
      if (some_device && env.rank == 0)
        options.log.warning(str("the ranks run on the CPU: ", error.what(),
                                "; with device \"cuda\" they share devices over \"staged\""));
    }
  }
  if (backend == "nccl" || backend == "staged")
    throw CommError("backend \"", backend,
                    "\" moves CUDA tensors; CPU tensors need \"shm\", \"hybrid\" or \"gloo\"");
  return at::kCPU;
}

CommunicatorPtr join(const JoinOptions& options, const Environment& env) { return join(options, env, {}); }

CommunicatorPtr join(const JoinOptions& asked, const Environment& env, const GivenMachine& given) {
  JoinOptions options = asked;
  options.rendezvous_timeout = env.rendezvous_timeout.value_or(asked.rendezvous_timeout);
  TESSERA_CHECK(env.rank >= 0 && env.rank < env.world_size, "rank ", env.rank, " of ", env.world_size);
  prepare_libtorch();
  const bool device_is_given = options.backend == "staged" && given.transfer;
  const at::Device device = device_is_given ? at::Device(at::kCPU) : choose_device(options, env);
  if (device.is_cuda()) set_cuda_device(device.index());
  if (env.world_size == 1)
    return std::make_shared<SelfCommunicator>(SimulatedGroup{.timeout = options.timeout, .device = device});
  raise_open_files(env.world_size, env.rank == 0 && !env.agent_store, options.backend);
  if (env.rank == 0) await_other_ranks(options.interrupt);  // of an earlier group, which may be at this port
  const Rendezvous met =
      rendezvous(env, options, settings_of(options, device), given.host ? given.host(env.rank) : "");
  auto context =
      std::make_shared<GroupContext>(met.store, env.rank, env.world_size, met.serves_store, options);
  try {
    return open_group(context, met, env, gloo_options(env, options, met.one_host), options, device, given);
  } catch (const RankIsGone& error) {
    context->leave(error.what());
    std::set<int> gone(error.ranks().begin(), error.ranks().end());
    for (const int rank : met.store.gone()) gone.insert(rank);
    throw RankIsGone(std::vector<int>(gone.begin(), gone.end()));
  } catch (const StoreIsGone&) {  // rank 0 may have ended because of another
    if (const std::vector<int> gone = met.store.gone(); gone.size() > 1) throw RankIsGone(gone);
    throw;
  } catch (const std::exception& error) {
    context->leave(error_message(error));
    throw;
  }
}

void leave_because_of(const std::exception& error, Communicator& comm) {
  auto* group = dynamic_cast<TransportCommunicator*>(&comm);
  if (group == nullptr) return;
  group->abort(abridged(error_message(error), 500));
  if (group->has_failed_by_peer() && dynamic_cast<const PeerFailure*>(&error) == nullptr)
    throw PeerFailure(error_message(error));
}

void run_threads(int world_size, const JoinOptions& options,
                 const std::function<void(CommunicatorPtr)>& body) {
  run_threads(world_size, options, {}, body);
}

void run_threads(int world_size, const JoinOptions& asked, const GivenMachine& given,
                 const std::function<void(CommunicatorPtr)>& body) {
  TESSERA_CHECK(world_size >= 1, world_size, " ranks");
  TESSERA_CHECK(asked.device == "cpu", "ranks as threads are for CPU tensors");
  if (!given.transfer) choose_device(asked, {});  // throws for what moves CUDA tensors
  if (world_size == 1) return body(std::make_shared<SelfCommunicator>(asked.timeout));
  prepare_libtorch();
  JoinOptions options = asked;
  if (options.backend == "auto") options.backend = "gloo";
  Rendezvous met{.store = {c10::make_intrusive<c10d::HashStore>(), "the threads' store"}, .one_host = true};
  for (int rank = 0; rank < world_size; ++rank) {
    const bool on_second = options.backend == "hybrid" && 2 * rank >= world_size;
    met.may_share.push_back(given.host ? given.host(rank) : on_second ? "second" : "first");
  }
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
    Environment env;
    env.rank = rank;
    env.world_size = world_size;
    try {
      comm = open_group(
          std::make_shared<GroupContext>(met.store, rank, world_size, /*serves_store=*/false, options), met,
          env, gloo_options(env, options), options, at::kCPU, given);
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
