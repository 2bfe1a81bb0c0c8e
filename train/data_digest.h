// What tells data sets apart without sending them: ranks whose files differ would train on a mixture that nobody asked for.
#pragma once

#include "comm/communicator.h"
#include "train/task.h"

namespace tessera::train {

/// Collective. Compares of each of the task's sets the size, and a digest (types, shapes, bytes) of up to 16 evenly spread samples, made one at a
/// time. Throws ConfigError, on all ranks alike, naming a set and a rank that has another one than rank 0; DataError where a sample cannot be made.
void check_same_data(const Task& task, comm::Communicator& comm);

}  // namespace tessera::train
