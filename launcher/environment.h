// The environment variables of core/environment.h from the launcher's side: whether it starts ranks, and what
// it tells them. They are torchrun's, so that any program written for it runs here, and ours under it.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

inline constexpr int kMaxRanks = 4096;

/// Local. Whether this process should start `nproc` ranks of itself (true), or is one rank (false): it is one
/// in a group (tessera::in_group), and when no more than one rank is asked for.
/// Throws ConfigError when `nproc` is not in 1..kMaxRanks, or differs from the number of ranks that another
/// launcher has already started here (LOCAL_WORLD_SIZE, else WORLD_SIZE).
bool should_start_ranks(std::optional<int> nproc);

/// What one rank on this host is told.
struct RankVariables {
  int rank = 0;
  int world_size = 1;
  std::string master_addr;
  int master_port = 0;
  std::string run_id;
  std::string error_file;  ///< see launcher/error_file.h
};

/// Local. This process's environment as "NAME=value" with the rank's variables in place of any of the same
/// name: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT, TESSERA_RUN_ID, TESSERA_ERROR_FILE, and OMP_NUM_THREADS when it is unset (cores / world_size,
/// at least 1). What an outer torchrun says of its own group (TORCHELASTIC_*) is left out.
std::vector<std::string> rank_environment(const RankVariables& variables);

}  // namespace tessera::launcher
