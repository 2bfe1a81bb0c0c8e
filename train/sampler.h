// Which samples a rank sees, and when.
//
// [Note: the global batch does not depend on the world]
// An epoch is one shuffled order of the training set, equal on every rank. Step k takes the next
// train_batch_size samples of it, whatever the number of ranks; only then are they cut, by micro-step first
// and by rank second. So runs of different world sizes, or with another micro-batch, train on the same
// samples at every step and their losses can be compared.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::train {

/// Local. The numbers 0 .. size-1 in an order that depends on (seed, epoch) alone: equal on every rank,
/// machine and compiler (Fisher-Yates over std::mt19937_64; std::shuffle's order is up to the library).
std::vector<int64_t> shuffled_indices(int64_t size, uint64_t seed, int64_t epoch);

/// Samples of each part of a set, by number.
struct Parts {
  std::vector<int64_t> train, validation, test;
};

struct PartsOptions {
  double validation_fraction = 0.1;
  double test_fraction = 0.1;
  uint64_t seed = 0;
};

/// Local. The numbers 0 .. size-1 in three parts, in the random order of shuffled_indices: equal on every
/// machine. Fractions are rounded down.
Parts split_into_parts(int64_t size, const PartsOptions& options);

/// Where the training order stands.
struct EpochPosition {
  int64_t epoch = 0;               ///< from 0
  int64_t samples_into_epoch = 0;  ///< of the epoch's order, over all ranks
  bool operator==(const EpochPosition&) const = default;
};

/// How a global batch is cut.
struct BatchShape {
  int64_t micro_batch = 1;         ///< samples a rank sees in one micro-step
  int64_t accumulation_steps = 1;  ///< micro-steps of one optimizer step
  int world_size = 1;
  int rank = 0;

  int64_t global_batch() const { return micro_batch * accumulation_steps * world_size; }
};

/// What one rank sees in one micro-step.
struct TrainSlice {
  std::vector<int64_t> indices;  ///< never empty: a slice without a sample has one that counts with weight 0
  int64_t num_samples = 0;       ///< that count
  double weight =
      1;  ///< of its mean loss: the mean of all weighted slices of a step is the mean over the step's samples
};

/// How an epoch goes through the training set.
struct TrainOrder {
  bool drop_last = true;  ///< false: what is left over of an epoch is a smaller step
  bool shuffle = true;    ///< false: every epoch is in the order of the set
  /// By sample: how much it counts in the mean of its slice's loss (its tokens that are not ignored,
  /// say). Slices are weighted so that the mean over a step is the mean over all that counts in it,
  /// however it is cut. Null: all samples alike.
  std::shared_ptr<const std::vector<float>> weights = nullptr;
};

/// Local. Seed of what is random about one rank's samples of a micro-step: depends on these numbers alone.
/// `first`: as in TrainSampler, the step.
uint64_t augmentation_seed(uint64_t seed, int64_t epoch, int64_t first, int64_t micro_step, int rank);

/// Training order. A step is named by how many samples of its epoch come before it, so that a run can go on
/// with another batch size where it stopped. The samples left over after the last whole global batch of an
/// epoch are dropped (another shuffle drops others), or without drop_last make a step of their own, cut
/// evenly over all slices. Owns one permutation; not thread-safe.
class TrainSampler {
 public:
  /// Local. Throws ConfigError when the set has no step: fewer samples than one
  /// global batch, or without drop_last none.
  TrainSampler(int64_t num_samples, const BatchShape& shape, uint64_t seed, TrainOrder order = {});

  const BatchShape& shape() const { return shape_; }
  uint64_t seed() const { return seed_; }
  int64_t steps_per_epoch() const { return steps_behind(0); }
  /// Local. Steps of an epoch behind its `first` samples.
  int64_t steps_behind(int64_t first) const;
  /// Samples of an epoch that are trained on.
  int64_t samples_per_epoch() const;
  /// Local. Samples, over all ranks, of the step behind the epoch's `first`
  /// samples; 0: the epoch has no further step.
  int64_t step_size(int64_t first) const;
  /// Local. Puts this epoch, counted from 0, in order; to be called before slice().
  void set_epoch(int64_t epoch);
  /// Local. This rank's part of `micro_step` of that step.
  TrainSlice slice(int64_t first, int64_t micro_step) const;

 private:
  double weight_of(int64_t begin, int64_t end) const;

  int64_t num_samples_;
  BatchShape shape_;
  uint64_t seed_;
  TrainOrder how_;
  std::vector<int64_t> order_;
};

/// One batch of an evaluation: `indices` always has the full batch size; only the first `num_valid` are
/// samples, the rest is padding (a repeated index) that must not be counted.
struct EvalBatch {
  std::vector<int64_t> indices;
  int64_t num_valid = 0;
};

/// Evaluation order: every sample exactly once over all ranks, in order, with an equal number of batches on
/// every rank (at stage 3 a forward pass is a collective).
class EvalSampler {
 public:
  EvalSampler(int64_t num_samples, int64_t batch_size, int world_size, int rank);

  /// Local. Equal on every rank.
  int64_t num_batches() const;
  /// Local. This rank's part of round `index`; num_valid is 0 when nothing is left for it.
  EvalBatch batch(int64_t index) const;

 private:
  int64_t num_samples_;
  int64_t batch_size_;
  int world_size_;
  int rank_;
};

}  // namespace tessera::train
