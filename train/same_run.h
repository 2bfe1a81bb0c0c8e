// What must be the same on all ranks of a run, besides its data (train/data_digest.h).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "train/trainer_config.h"

namespace tessera::train {

/// Collective. Compares the resolved configuration, but for a rank's own matters: its threads, and where its
/// host has the files of the model and the data. `flags`: what else the command line says. Throws
/// ConfigError, on all ranks in the same words.
void check_same_run(const RunConfig& run, comm::Communicator& comm,
                    const std::vector<std::pair<std::string, bool>>& flags = {});

}  // namespace tessera::train
