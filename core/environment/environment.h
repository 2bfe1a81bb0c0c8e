// The environment variables that give a rank its place in a group: torchrun's (torch.distributed.run), and
// those of MPI's launchers, Slurm, Horovod and Kubernetes' PyTorchJob
// (core/environment/environment_schemes.h).
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// Names of variables are torchrun's; another launcher's stand in for them.
struct Environment {
  int rank = 0;              ///< RANK
  int world_size = 1;        ///< WORLD_SIZE
  int local_rank = 0;        ///< LOCAL_RANK
  int local_world_size = 1;  ///< LOCAL_WORLD_SIZE (default: world_size; 1 in a pod of PyTorchJob)
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR
  int master_port = 29500;                ///< MASTER_PORT
  /// True when torchrun's agent serves the store (TORCHELASTIC_USE_AGENT_STORE=True); rank 0 is then a
  /// client.
  bool agent_store = false;
  int restart_count = 0;  ///< TORCHELASTIC_RESTART_COUNT: how often the launcher has started the ranks again
  /// TESSERA_RENDEZVOUS_TIMEOUT_S: the launcher's --rendezvous-timeout, in place of
  /// comm::JoinOptions::rendezvous_timeout.
  std::optional<std::chrono::milliseconds> rendezvous_timeout = std::nullopt;
  /// TESSERA_RUN_SECRET: what only the ranks of this run know (comm/control/sealed_store.h); empty: they need
  /// not.
  std::string run_secret = {};
  /// What set the place: "torchrun" (or anything that sets the same variables), "Open MPI", "Slurm" ...;
  /// empty: nothing did.
  std::string launcher;
};

/// Reads the variables. None set: a single rank. MASTER_ADDR and MASTER_PORT always count where they
/// are set. Without them ranks of torchrun's variables are an error; for the others, the address is 127.0.0.1
/// where all ranks are on this host, else the first host of Slurm's list, and the port is derived from the
/// job's id.
///
/// Throws CommError naming the variables, what they hold and what to do, when one is malformed, missing
/// beside the others, or out of range (RANK >= WORLD_SIZE ...), or when torchrun's variables, set by hand,
/// contradict another launcher's.
Environment environment();

/// The same by a launcher's variables other than torchrun's; nullopt without any. Throws CommError.
std::optional<Environment> scheduler_environment();

/// Whether this process is a rank of a group that something else has started, and must not start
/// others: RANK and WORLD_SIZE are set, or another launcher's variables for more than one rank.
bool in_group();

/// The rendezvous' port of a run for which none was given: from its id alone, 15000 to 29999, so that
/// two runs most likely get different ones. Below the ports that the kernel gives to outgoing connections
/// (32768 and up), and below those of Kubernetes (30000 and up).
int port_of_run(std::string_view id);

}  // namespace tessera
