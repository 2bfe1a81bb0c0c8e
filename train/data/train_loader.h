// TrainLoader: a task's training batches, one per micro-step, over any number of epochs.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "train/data/data_loader.h"
#include "train/task/sampler.h"
#include "train/task/task.h"

namespace tessera::train {

/// The sampler for the task's training order and the configuration's batches, for `rank` of
/// `world_size` ranks. Throws as TrainSampler.
TrainSampler train_sampler(const RunConfig& run, const Task& task, int world_size, int rank);

/// Enumerates one rank's samples, micro-step by micro-step. A value type.
class TrainPlan {
 public:
  struct MicroStep {
    TrainSlice slice;
    uint64_t seed = 0;      ///< for their augmentation
    int64_t step_size = 0;  ///< samples of the whole step, over all micro-steps and ranks
    bool ends_step = false;
    EpochPosition position_after;  ///< after this micro-step, if it ends the step
  };

  /// Begins with the step at `start`.
  TrainPlan(TrainSampler sampler, const EpochPosition& start);
  /// The next micro-step. There is no end.
  MicroStep next();

 private:
  TrainSampler sampler_;
  EpochPosition position_;
  int64_t micro_step_ = 0;
};

/// Is for the warning about a loss that is not finite. Describes the samples of its micro-step, such as "of
/// samples 7, 123 and 10 more of the training data: sample 123 holds a value that is not finite".
std::string describe_samples(const Task& task, const TrainPlan::MicroStep& micro_step);

/// One rank's part of a micro-step.
struct TrainBatch {
  Batch batch;            ///< on the device
  double weight = 1;      ///< factor for its loss (TrainSlice)
  int64_t step_size = 0;  ///< samples of the whole step, over all micro-steps and ranks
};

/// Gives the trainer its batches, and says where the epoch stands. Owns a TrainPlan and a DataLoader. Borrows
/// the task, which must outlive it. Used by one thread.
class TrainLoader {
 public:
  /// Begins at `start` and ends after `num_steps` steps, so that no unused batches are prefetched.
  /// Throws Error.
  TrainLoader(const Task& task, TrainSampler sampler, const EpochPosition& start, int64_t num_steps,
              const DataLoaderOptions& options);

  /// The next micro-step's batch. Throws what Task::train_batch throws; the loader is unusable then.
  TrainBatch next();
  /// The position after the last step that next() has returned completely.
  const EpochPosition& position() const { return position_; }

 private:
  DataLoader::Make plan();

  const Task& task_;
  TrainPlan plan_;          // ahead of the returned batches
  EpochPosition position_;  // of the returned batches
  int64_t steps_left_;
  std::deque<TrainPlan::MicroStep> ahead_;  // planned and not yet returned, without their indices
  DataLoader loader_;                       // calls plan(), so it is destroyed first
};

}  // namespace tessera::train
