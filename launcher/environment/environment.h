// The launcher's use of the environment variables of core/environment/environment.h: whether to start ranks,
// this host's place among several, and which variables each rank gets. They are torchrun's, so that programs
// written for torchrun run under this launcher and Tessera's programs run under torchrun.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launcher {

inline constexpr int kMaxRanks = 4096;

/// What the launcher of a run gives to those that it starts on the hosts: the hosts and their slots, in
/// --include's form.
inline constexpr const char* kHostsVariable = "TESSERA_LAUNCH_HOSTS";
/// Set to 1 for such a launcher: it ends when its standard input does, and reports a failure to the one that
/// started it.
inline constexpr const char* kAgentVariable = "TESSERA_LAUNCH_AGENT";

/// The place of a launcher among those of a run's hosts, one on each.
struct HostPlace {
  int node_rank = 0;
  int num_nodes = 1;
  std::string master_addr = {};  ///< empty: not said
  int master_port = 0;           ///< 0: any free one
  std::optional<int> nproc;      ///< ranks to start here
  std::string nproc_word = {};   ///< "auto", "gpu" …: PET_NPROC_PER_NODE is no number
  std::string range = {};  ///< "1:2": PET_NNODES is none, so that it is not known how many hosts there are
  int max_restarts = 0;    ///< PET_MAX_RESTARTS
};

/// The place that something else has given to this process as one of a host: srun, mpirun or
/// horovodrun with one process on each of several hosts, or torchrun's own variables PET_NNODES,
/// PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MAX_RESTARTS, PET_MASTER_ADDR (without it MASTER_ADDR) and
/// PET_MASTER_PORT, which the operator of Kubernetes' PyTorchJob sets. nullopt: there is none. Throws
/// CommError as tessera::environment().
std::optional<HostPlace> place_of_this_host();

/// Whether this process should start `nproc` ranks of itself (true) or is a rank itself (false). It is
/// a rank if it is part of a group (tessera::in_group), or if only one rank is asked for; but several ranks
/// for a process that is alone on its host (place_of_this_host) are started. Throws ConfigError if `nproc` is
/// not in 1..kMaxRanks, or differs from the number of ranks that another launcher has started
/// (LOCAL_WORLD_SIZE, else WORLD_SIZE).
bool should_start_ranks(std::optional<int> nproc);

/// The values of one rank's environment variables.
struct RankVariables {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
  std::string master_addr = {};
  int master_port = 0;
  std::string run_id = {};
  int restart_count = 0;
  int max_restarts = 0;
  std::string memory_folder = {};    ///< TESSERA_MEMORY_DIR; empty: as it is
  std::string run_secret = {};       ///< TESSERA_RUN_SECRET; empty: as it is
  std::string error_file = {};       ///< see launcher/process/error_file.h
  std::string visible_devices = {};  ///< CUDA_VISIBLE_DEVICES; empty: as it is
  /// What OMP_NUM_THREADS is where it is unset; nullopt: this rank's share of the cores.
  std::optional<int> num_cores = std::nullopt;
  std::vector<std::string> given = {};  ///< "NAME=value" of --env-file; the variables above come after them
};

/// Whether rank_environment() gives a variable a value of its own for all of RankVariables.
bool is_always_set(std::string_view name);

/// This process's environment as "NAME=value" with these variables set for the rank: RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TESSERA_RUN_ID,
/// TESSERA_ERROR_FILE, TORCHELASTIC_ERROR_FILE, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, and
/// OMP_NUM_THREADS when it is unset (cores / local_world_size, at least 1), TESSERA_RUN_SECRET,
/// TESSERA_MEMORY_DIR. What belongs to an outer launcher is removed: the other TORCHELASTIC_*, PET_*, and in
/// one of its ranks TESSERA_MEMORY_DIR.
std::vector<std::string> rank_environment(const RankVariables& variables);

}  // namespace tessera::launcher
