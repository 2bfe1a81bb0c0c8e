// Checks that all ranks of a run have the same configuration. For the data see train/data/data_digest.h.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

/// Collective. Compares the ranks' resolved configurations, except for keys that may differ between ranks
/// (such as thread counts and file paths). `flags`: further command line flags to compare. Throws
/// ConfigError, with the same message on all ranks.
void check_same_run(const RunConfig& run, comm::Communicator& comm,
                    const std::vector<std::pair<std::string, bool>>& flags = {});

}  // namespace tessera::train
