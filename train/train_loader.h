// TrainLoader: a task's training batches, micro-step after micro-step, epoch after epoch.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "train/data_loader.h"
#include "train/sampler.h"
#include "train/task.h"

namespace tessera::train {

/// Local. The task's training order, in the configuration's batches, for one
/// rank of so many. Throws as TrainSampler.
TrainSampler train_sampler(const RunConfig& run, const Task& task, int world_size, int rank);

/// One rank's samples, micro-step after micro-step, epoch after epoch. A value.
class TrainPlan {
 public:
  struct MicroStep {
    TrainSlice slice;
    uint64_t seed = 0;      ///< of what is random about them
    int64_t step_size = 0;  ///< samples of the whole step, over all micro-steps and ranks
    bool ends_step = false;
    EpochPosition behind;  ///< where the data stand then, if it ends the step
  };

  /// Local. Begins with the step at `start`.
  TrainPlan(TrainSampler sampler, const EpochPosition& start);
  /// Local. There is always one more.
  MicroStep next();

 private:
  TrainSampler sampler_;
  EpochPosition position_;
  int64_t micro_step_ = 0;
};

/// Local. For messages: what is known of the samples that `micro_step` gave a loss of which is not finite,
/// such as "of samples 7, 123 and 10 more of the training data: sample 123 holds a value that is not finite".
std::string describe_samples(const Task& task, const TrainPlan::MicroStep& micro_step);

/// One rank's part of a micro-step.
struct TrainBatch {
  Batch batch;            ///< on the device
  double weight = 1;      ///< of its loss (TrainSlice)
  int64_t step_size = 0;  ///< samples of the whole step, over all micro-steps and ranks
};

/// Owns plan and loader; borrows the task, which must outlive it. Used by one thread.
class TrainLoader {
 public:
  /// Local. Begins at `start`, and ends after `num_steps` steps, so that
  /// nothing is made for nobody. Throws Error.
  TrainLoader(const Task& task, TrainSampler sampler, const EpochPosition& start, int64_t num_steps,
              const DataLoaderOptions& options);

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
  TrainPlan plan_;          // ahead of what was handed over
  EpochPosition position_;  // of what was handed over
  int64_t steps_left_;
  std::deque<Planned> ahead_;
  DataLoader loader_;  // refers to this
};

}  // namespace tessera::train
