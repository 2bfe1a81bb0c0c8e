// Which samples a rank sees, and when.
//
// [Note: the global batch does not depend on the world]
// An epoch is one shuffled order of the training set, equal on every rank. Step k takes the next
// train_batch_size samples of it, whatever the number of ranks; only then are they cut, by micro-step first
// and by rank second. So runs of different world sizes, or with another micro-batch, train on the same
// samples at every step and their losses can be compared.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::train {

/// Local. The numbers 0 .. size-1 in an order that depends on (seed, epoch) alone: equal on every rank,
/// machine and compiler (Fisher-Yates over std::mt19937_64; std::shuffle's order is up to the library).
std::vector<int64_t> shuffled_indices(int64_t size, uint64_t seed, int64_t epoch);

/// How a global batch is cut.
struct BatchShape {
  int64_t micro_batch = 1;         ///< samples a rank sees in one micro-step
  int64_t accumulation_steps = 1;  ///< micro-steps of one optimizer step
  int world_size = 1;
  int rank = 0;

  int64_t global_batch() const { return micro_batch * accumulation_steps * world_size; }
};

/// Training order. The samples left over after the last whole global batch of an epoch are dropped (another
/// shuffle drops others). Owns one permutation; not thread-safe.
class TrainSampler {
 public:
  /// Local. Throws ConfigError when the set is smaller than one global batch.
  TrainSampler(int64_t num_samples, const BatchShape& shape, uint64_t seed);

  int64_t steps_per_epoch() const { return num_samples_ / shape_.global_batch(); }
  /// Local. Shuffles for this epoch, counted from 0.
  void set_epoch(int64_t epoch);
  /// Local. This rank's samples at `micro_step` of optimizer step `step` of the epoch: micro_batch indices.
  std::vector<int64_t> indices(int64_t step, int64_t micro_step) const;

 private:
  int64_t num_samples_;
  BatchShape shape_;
  uint64_t seed_;
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
