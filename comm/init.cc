#include "comm/init.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include "comm/c10_words.h"
#include "comm/c10d.h"
#include "comm/explain.h"
#include "comm/gloo.h"
#include "comm/nccl.h"
#include "comm/network.h"
#include "comm/open_files.h"
#include "comm/rendezvous.h"
#include "comm/self.h"
#include "comm/shm.h"
#include "comm/shm/shared_memory.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// [Note: libtorch's settings] Three process-wide settings are changed unless the user has set them:
//  - c10d logs every retry of a connection on stderr; only errors remain (TORCH_CPP_LOG_LEVEL).
//  - Its flight recorder notes down each collective, in a map that groups on several threads write to without
//  a
//    lock, and for an all-gather allocates a full-size buffer only to note its shape; it is turned off
//    (TORCH_FR_BUFFER_SIZE). Ledger keeps what we need.
//  - Gloo and the store's client write to connections whose other end may be gone, and count on what Python
//  does for its
//    programs: SIGPIPE is ignored, so that the write fails with an error instead of ending the process.
// All must happen before the first process group, and while no other thread reads the environment.
void prepare_libtorch() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  struct sigaction pipe{};
  if (sigaction(SIGPIPE, nullptr, &pipe) == 0 && pipe.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

/// Throws CommError for a word that is none, or that cannot move such tensors.
void check_backend(const Options& options) {
  const std::string& backend = options.backend;
  if (backend != "auto" && backend != "shm" && backend != "gloo" && backend != "nccl")
    throw CommError(
        str("unknown backend \"", backend, "\": expected \"auto\", \"shm\", \"gloo\" or \"nccl\""));
  if ((backend == "shm" || backend == "gloo") && options.cuda)
    throw CommError(str("backend \"", backend, "\" moves CPU tensors; CUDA tensors need \"nccl\""));
  if (backend == "nccl" && !options.cuda)
    throw CommError("backend \"nccl\" moves CUDA tensors; CPU tensors need \"shm\" or \"gloo\"");
}

/// Collective. Whether all ranks can have shared memory; if not, why.
std::string obstacle_to_shared_memory(const Meeting& meeting, const Environment& env, milliseconds timeout) {
  if (!meeting.one_host) return "the ranks are on several hosts, or in several network namespaces";
  std::string mine;
  try {
    shm::SharedMemory::create(1 << 20);
  } catch (const CommError& error) {
    mine = error.what();
  }
  const GroupStore store = meeting.store.under("shm_probe");
  store.set(std::to_string(env.rank), mine);
  const std::vector<int> missing = store.await_ranks("", env.world_size, timeout, [] {});
  if (!missing.empty()) throw CommError(str(name_ranks(missing), " left during the rendezvous"));
  for (int rank = 0; rank < env.world_size; ++rank)
    if (const std::string theirs = store.get(std::to_string(rank)); !theirs.empty())
      return str("rank ", rank, ": ", theirs);
  return "";
}

/// Collective. "shm", "gloo" or "nccl".
std::string choose_backend(const Meeting& meeting, const Environment& env, const Options& options) {
  if (options.cuda) return "nccl";
  if (options.backend == "gloo") return "gloo";
  const std::string obstacle = obstacle_to_shared_memory(meeting, env, options.rendezvous_timeout);
  if (obstacle.empty()) return "shm";
  if (options.backend == "shm") throw CommError(str("backend \"shm\" cannot be used: ", obstacle));
  if (meeting.one_host && env.rank == 0)
    options.log.warning(
        str("the ranks share a host, but not memory, and use Gloo, which is slower: ", obstacle));
  return "gloo";
}

GlooOptions gloo_options(const Environment& env, const Options& options, bool one_host) {
  GlooOptions gloo;
  gloo.rank = env.rank;
  gloo.size = env.world_size;
  gloo.timeout = options.timeout;
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

/// Runs one rank of run_threads(); what it throws is kept if it is the first.
class ThreadRanks {
 public:
  ThreadRanks(int world_size, const Options& options) : world_size_(world_size), options_(options) {}

  void run(int rank, const std::function<void(CommunicatorPtr)>& body) {
    std::shared_ptr<C10dCommunicator> comm;
    try {
      comm = join(rank);
      body(comm);
    } catch (const CommError& error) {
      keep(first_comm_error_);
      if (comm) comm->abort(first_line(error.what()));
    } catch (const std::exception& error) {
      keep(first_error_);
      if (comm) comm->abort(first_line(error.what()));
    } catch (...) {
      keep(first_error_);
      if (comm) comm->abort("unknown error");
    }
  }

  void rethrow() const {
    if (first_error_) std::rethrow_exception(first_error_);
    if (first_comm_error_) std::rethrow_exception(first_comm_error_);
  }

 private:
  std::shared_ptr<C10dCommunicator> join(int rank) {
    const GroupStore store(store_, "the threads' store");
    auto family = std::make_shared<Family>(store, rank, world_size_, /*serves=*/false);
    GlooOptions gloo;
    gloo.rank = rank;
    gloo.size = world_size_;
    gloo.timeout = options_.timeout;
    gloo.connect_timeout = options_.rendezvous_timeout;
    return std::make_shared<C10dCommunicator>(
        std::move(family), options_.timeout, [&](const GroupStore& group_store, FailureHook on_failure) {
          if (options_.backend == "shm")
            return make_shm_transport(group_store, rank, world_size_, options_.timeout,
                                      options_.rendezvous_timeout);
          return make_gloo_transport(group_store, gloo, std::move(on_failure));
        });
  }

  void keep(std::exception_ptr& place) {
    std::lock_guard lock(mutex_);
    if (!place) place = std::current_exception();
  }

  const int world_size_;
  const Options options_;
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex_;  ///< guards what follows
  std::exception_ptr first_error_;
  std::exception_ptr first_comm_error_;  ///< mostly the consequence of another rank's error
};

}  // namespace

CommunicatorPtr connect(const Environment& env, const Options& given) {
  Options options = given;
  options.rendezvous_timeout = env.rendezvous_timeout.value_or(given.rendezvous_timeout);
  TESSERA_CHECK(env.rank >= 0 && env.rank < env.world_size, "rank ", env.rank, " of ", env.world_size);
  prepare_libtorch();
  check_backend(options);
  if (options.cuda) prepare_cuda(env.local_rank, env.local_world_size);
  if (env.world_size == 1) return std::make_shared<SelfCommunicator>(options.timeout);
  check_open_files(env.world_size, env.rank == 0 && !env.agent_store, options.backend);
  const Meeting meeting = meet(env, options.rendezvous_timeout, terms_of(options), options.log);
  auto family = std::make_shared<Family>(meeting.store, env.rank, env.world_size, meeting.serves);
  const std::string backend = choose_backend(meeting, env, options);
  const MakeTransport make = [&](const GroupStore& store, FailureHook on_failure) {
    if (backend == "shm")
      return make_shm_transport(store, env.rank, env.world_size, options.timeout, options.rendezvous_timeout);
    if (backend == "nccl") return make_nccl_transport(store, env, options.timeout);
    return make_gloo_transport(store, gloo_options(env, options, meeting.one_host), std::move(on_failure));
  };
  return std::make_shared<C10dCommunicator>(std::move(family), options.timeout, make);
}

void run_threads(int world_size, const Options& options, const std::function<void(CommunicatorPtr)>& body) {
  TESSERA_CHECK(world_size >= 1, world_size, " ranks");
  TESSERA_CHECK(!options.cuda, "ranks as threads are for CPU tensors");
  if (world_size == 1) return body(std::make_shared<SelfCommunicator>(options.timeout));
  prepare_libtorch();
  ThreadRanks ranks(world_size, options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&ranks, &body, rank] { ranks.run(rank, body); });
  }
  for (std::thread& thread : threads) thread.join();
  ranks.rethrow();
}

}  // namespace tessera::comm
