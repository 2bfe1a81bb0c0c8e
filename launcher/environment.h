// The launcher's use of the environment variables of core/environment.h: whether to start ranks, and which
// variables each rank gets. They are torchrun's, so that programs written for torchrun run under this
// launcher and Tessera's programs run under torchrun.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

inline constexpr int kMaxRanks = 4096;

/// Local. Whether this process should start `nproc` ranks of itself (true) or is a rank itself (false). It is
/// a rank if it is part of a group (tessera::in_group), or if only one rank is asked for. Throws ConfigError
/// if `nproc` is not in 1..kMaxRanks, or differs from the number of ranks that another launcher has started
/// (LOCAL_WORLD_SIZE, else WORLD_SIZE).
bool should_start_ranks(std::optional<int> nproc);

/// The values of one rank's environment variables.
struct RankVariables {
  int rank = 0;
  int world_size = 1;
  std::string master_addr;
  int master_port = 0;
  std::string run_id;
  std::string error_file;  ///< see launcher/error_file.h
};

/// Local. This process's environment as "NAME=value" with these variables set for the rank: RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TESSERA_RUN_ID,
/// TESSERA_ERROR_FILE, and OMP_NUM_THREADS when it is unset (cores / world_size, at least 1). TORCHELASTIC_*
/// of an outer torchrun is removed.
std::vector<std::string> rank_environment(const RankVariables& variables);

}  // namespace tessera::launcher
