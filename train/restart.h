// What ranks do that a launcher has started again after a failure: they continue from the run's newest
// checkpoint that is whole.
#pragma once

#include <string>

#include "comm/communicator.h"
#include "train/task/trainer_config.h"
#include "train/trainer.h"

namespace tessera::train {

/// Names the run, the same on rank 0 after a restart, and another for each start of a launcher:
/// TESSERA_RUN_ID; under torchrun TORCHELASTIC_RUN_ID, or where that is "none" its agent's process. Empty:
/// started by hand, or by a launcher that does not restart.
std::string launched_run();

/// This host's folder in memory, which a launcher keeps while it starts ranks again
/// (TESSERA_MEMORY_DIR); empty: there is none.
std::string memory_folder();

/// Collective. If these ranks were started again (`restart_count`, the largest of any rank, is above 0), sets
/// `start` to resume from what this run has saved: from the checkpoints in the run's folder and in
/// start.memory that this start of the launcher has saved (launched_run()), the newest first, whatever
/// `latest` names; of a run that --resume continues also from the one it was told to, or, without a tag, from
/// the others of the folder. Sets the micro-batch and accumulation so that a step has as many samples as the
/// newest's. If there is none, changes nothing: the run begins as its first attempt did. Waits, up to 2
/// minutes, until the attempt before has left the folder. Throws ConfigError if the number of ranks does not
/// divide the batch, or if there is none, but there are damaged ones.
void continue_after_restart(RunConfig& run, TrainerStart& start, int restart_count, comm::Communicator& comm);

}  // namespace tessera::train
