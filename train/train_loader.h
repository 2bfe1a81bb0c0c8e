// TrainLoader: a task's training batches, micro-step after micro-step, epoch after epoch.
#pragma once

#include <cstdint>
#include <deque>

#include "train/data_loader.h"
#include "train/sampler.h"
#include "train/task.h"

namespace tessera::train {

/// Local. The task's training order, in the configuration's batches, for one rank of so many. Throws as TrainSampler.
TrainSampler train_sampler(const RunConfig& run, const Task& task, int world_size, int rank);

/// One rank's part of a micro-step.
struct TrainBatch {
  Batch batch;               ///< on the device
  double weight = 1;         ///< of its loss (TrainSlice)
  int64_t step_size = 0;     ///< samples of the whole step, over all micro-steps and ranks
};

/// Owns sampler and loader; borrows the task, which must outlive it. Used by one thread.
class TrainLoader {
 public:
  /// Local. Begins at `start`, and ends after `num_steps` steps, so that nothing is made for nobody. Throws Error.
  TrainLoader(const Task& task, TrainSampler sampler, const EpochPosition& start, int64_t num_steps, const DataLoaderOptions& options);

  /// Local. The next micro-step's. Throws what Task::train_batch throws for it; then it is over.
  TrainBatch next();
  /// Behind the last step of which next() gave the last micro-step.
  const EpochPosition& position() const { return position_; }

 private:
  DataLoader::Make plan();
  /// Of a batch that is planned and not handed over.
  struct Planned {
    TrainBatch outline;  // but for the batch
    bool ends_step = false;
    EpochPosition behind;
  };

  const Task& task_;
  TrainSampler sampler_;
  EpochPosition position_;  // of what was handed over
  EpochPosition planned_;   // of what was planned
  int64_t micro_step_ = 0, steps_left_;
  std::deque<Planned> ahead_;
  DataLoader loader_;  // refers to this
};

}  // namespace tessera::train
