// DeepSpeed's files "…_optim_states.pt": of each rank a part of flat groups, in which parameters lie one
// after the other.
#pragma once

#include "checkpoint/foreign/deepspeed_files.h"
#include "checkpoint/foreign/deepspeed_model.h"
#include "checkpoint/foreign/foreign_checkpoint.h"

namespace tessera::checkpoint {

/// Fills parameters, groups, stage, world size and loss scaler from the files of all ranks.
void read_zero_optimizer(ForeignCheckpoint& checkpoint, const DeepSpeedFiles& files,
                         const DeepSpeedModel& model);

}  // namespace tessera::checkpoint
