// How a rank joins its group: from torchrun's environment variables, alone, or as a thread (tests).
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "core/log.h"

namespace tessera::comm {

/// Where this rank stands, under torchrun's names for it.
struct Environment {
  int rank = 0;                           ///< RANK
  int world_size = 1;                     ///< WORLD_SIZE
  int local_rank = 0;                     ///< LOCAL_RANK
  int local_world_size = 1;               ///< LOCAL_WORLD_SIZE (default: world_size)
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR
  int master_port = 29500;                ///< MASTER_PORT
  /// True when torchrun's agent already serves the store (TORCHELASTIC_USE_AGENT_STORE=True): then rank 0
  /// connects as a client too.
  bool agent_store = false;
  int restart_count = 0;  ///< TORCHELASTIC_RESTART_COUNT: an agent's store outlives the ranks it restarts
  /// TESSERA_STORE_FD: a listening socket on master_port, inherited from the launcher, that rank 0 serves the
  /// store on (no other process can take the port in between); -1: rank 0 opens its own.
  int store_fd = -1;
  /// TESSERA_RENDEZVOUS_TIMEOUT_S: the launcher's --rendezvous-timeout, in
  /// place of Options::rendezvous_timeout.
  std::optional<std::chrono::milliseconds> rendezvous_timeout = std::nullopt;
};

/// Local. Reads the variables above; neither RANK, WORLD_SIZE, LOCAL_RANK nor LOCAL_WORLD_SIZE set: one rank
/// alone. Throws CommError naming the variable when one is malformed, missing beside the others, or out of
/// range (RANK >= WORLD_SIZE …). MASTER_ADDR and MASTER_PORT are needed when WORLD_SIZE is above 1.
Environment environment();

struct Options {
  /// "nccl" for CUDA tensors; "shm" (all ranks on one host) or "gloo" for CPU tensors; "auto": nccl, shm or
  /// gloo, the first that can be. Ranks as threads: "auto" is gloo.
  std::string backend = "auto";
  bool cuda = false;  ///< the buffers will be CUDA tensors on device `local_rank`
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< of a collective; the same on all ranks
  /// From the first attempt to connect until all ranks have met: for connecting, sending and receiving.
  std::chrono::milliseconds rendezvous_timeout = std::chrono::minutes(5);
  Logger log{};  ///< says what a rendezvous of more than 5 s waits for, and when "auto" has to do without
                 ///< shared memory
};

/// Collective. Joins the group described by `env` over c10d's TCPStore (one rank alone: no network
/// at all). Throws CommError in one line: port in use (with the address), ranks missing (which),
/// WORLD_SIZE, backend, timeout or device differing between ranks, one RANK given to two
/// processes, too few files that may be open.
///
/// With `options.cuda` it also loads libtorch's CUDA half (core/cuda_plugin.h) and makes `local_rank` the
/// current device; call it before anything else touches libtorch, which otherwise settles for having no CUDA.
///
/// Destroying the last communicator of the group on rank 0 waits up to 5 s for the others to do the same,
/// because rank 0 serves the store they may still be reading.
CommunicatorPtr connect(const Environment& env, const Options& options);

/// Runs `body(comm)` on `world_size` threads, each a rank of one group over c10d's HashStore, and
/// returns when all have ended. When one throws, its group is aborted: the others' collectives fail
/// at once, naming the rank and its error. The first exception by time is rethrown; a CommError,
/// mostly the consequence of another rank's error, only when there is no other. Ranks as threads
/// share the process's default random generator.
void run_threads(int world_size, const Options& options, const std::function<void(CommunicatorPtr)>& body);

}  // namespace tessera::comm
