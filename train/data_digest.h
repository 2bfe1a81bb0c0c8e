// What tells data sets apart without sending them: ranks whose files differ would train on a mixture that nobody asked for.
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "train/task.h"

namespace tessera::train {

/// One of a task's sets, as this rank sees it.
struct SetDigest {
  std::string name;     ///< "training", "evaluation", "test"
  int64_t size = 0;
  std::string digest;   ///< of up to 16 evenly spread samples as the task gives them: types, shapes, bytes
};

/// Local. Of the training set, the one of eval_size() and the one of test_size(). Makes a sample at a time. Throws what making it throws.
std::vector<SetDigest> digest_sets(const Task& task);

/// Collective. Throws ConfigError, on all ranks alike, naming a set and a rank that has another one than rank 0; DataError where
/// a sample cannot be made.
void check_same_data(const Task& task, comm::Communicator& comm);

}  // namespace tessera::train
