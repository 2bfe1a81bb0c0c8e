// Samplers: the samples that each rank trains on and evaluates, in order.
//
// An epoch is one shuffled order of the training set, equal on every rank. Step k takes the next
// train_batch_size samples of it, for any number of ranks. These are divided by micro-step first and by rank
// second. So runs with different world sizes or micro-batches train on the same samples at every step, and
// their losses can be compared.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::train {

/// The numbers 0 .. size-1 in an order that depends only on (seed, epoch): equal on every rank,
/// machine and compiler (Fisher-Yates over std::mt19937_64; std::shuffle's order depends on the library).
std::vector<int64_t> shuffled_indices(int64_t size, uint64_t seed, int64_t epoch);

/// A data set split into parts; sample numbers.
struct Parts {
  std::vector<int64_t> train, validation, test;
};

struct PartsOptions {
  double validation_fraction = 0.1;
  double test_fraction = 0.1;
  uint64_t seed = 0;
};

/// Splits the numbers 0 .. size-1 in the order of shuffled_indices(size, seed, 0), equal on every
/// machine. The sizes of the validation and test parts are rounded down.
Parts split_into_parts(int64_t size, const PartsOptions& options);

/// A position in the training order.
struct EpochPosition {
  int64_t epoch = 0;               ///< from 0
  int64_t samples_into_epoch = 0;  ///< samples of the epoch used so far, over all ranks
  bool operator==(const EpochPosition&) const = default;
};

/// How a global batch is divided, and this rank's part.
struct BatchShape {
  int64_t micro_batch = 1;         ///< samples of one rank in one micro-step
  int64_t accumulation_steps = 1;  ///< micro-steps per optimizer step
  int world_size = 1;
  int rank = 0;

  int64_t global_batch() const { return micro_batch * accumulation_steps * world_size; }
};

/// One rank's samples of one micro-step.
struct TrainSlice {
  std::vector<int64_t> indices;  ///< never empty: a slice without samples has one with weight 0
  int64_t num_samples = 0;       ///< number of indices that count
  /// Factor for its mean loss, such that the mean over a step's slices is the mean over its samples.
  double weight = 1;
};

/// The order in which an epoch uses the training set.
struct TrainOrder {
  bool drop_last = true;  ///< false: the last samples of an epoch make a smaller step
  bool shuffle = true;    ///< false: every epoch has the order of the set
  /// The weight of each sample in its slice's mean loss, such as its number of tokens that are not ignored.
  /// Slices are weighted so that the mean over a step is the weighted mean over its samples, however it is
  /// divided. Null: all samples have the same weight.
  std::shared_ptr<const std::vector<float>> weights = nullptr;
};

/// Seed for the augmentation of one rank's samples of a micro-step. Depends only on these numbers.
/// `first`: identifies the step, as in TrainSampler.
uint64_t augmentation_seed(uint64_t seed, int64_t epoch, int64_t first, int64_t micro_step, int rank);

/// Computes the training order. A step is identified by `first`, the number of samples of its epoch before
/// it, so that a run can be resumed with another batch size. The samples after the last whole global batch of
/// an epoch are dropped (different ones in each shuffle); without drop_last they make a step of their own,
/// divided evenly over all slices. Owns one permutation; not thread-safe.
class TrainSampler {
 public:
  /// Throws ConfigError if an epoch has no step: the set has fewer samples than one global batch, or
  /// is empty.
  TrainSampler(int64_t num_samples, const BatchShape& shape, uint64_t seed, TrainOrder order = {});

  const BatchShape& shape() const { return shape_; }
  uint64_t seed() const { return seed_; }
  int64_t steps_per_epoch() const { return steps_remaining(0); }
  /// Steps of an epoch after its first `first` samples.
  int64_t steps_remaining(int64_t first) const;
  /// Samples used per epoch.
  int64_t samples_per_epoch() const;
  /// Samples, over all ranks, of the step at `first`; 0: the epoch has no further step.
  int64_t step_size(int64_t first) const;
  /// Computes the order of this epoch, counted from 0. To be called before slice().
  void set_epoch(int64_t epoch);
  /// This rank's part of `micro_step` of the step at `first`.
  TrainSlice slice(int64_t first, int64_t micro_step) const;

 private:
  double weight_of(int64_t begin, int64_t end) const;

  int64_t num_samples_;
  BatchShape shape_;
  uint64_t seed_;
  TrainOrder order_options_;
  std::vector<int64_t> order_;
};

/// One batch of an evaluation. `indices` always has the full batch size. Only the first `num_valid` are
/// samples; the rest is padding (a repeated index) that must not be counted.
struct EvalBatch {
  std::vector<int64_t> indices;
  int64_t num_valid = 0;
};

/// Computes the evaluation order: every sample exactly once over all ranks, in order, with the same number of
/// batches on every rank (at stage 3 a forward pass is collective). Immutable.
class EvalSampler {
 public:
  EvalSampler(int64_t num_samples, int64_t batch_size, int world_size, int rank);

  /// Equal on every rank.
  int64_t num_batches() const;
  /// This rank's batch number `index`; num_valid is 0 if no samples are left for it.
  EvalBatch batch(int64_t index) const;

 private:
  int64_t num_samples_;
  int64_t batch_size_;
  int world_size_;
  int rank_;
};

}  // namespace tessera::train
