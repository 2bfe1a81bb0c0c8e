#include "train/sampler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::train {
namespace {

// splitmix64's finalizer: neighbouring (seed, epoch) pairs give unrelated generator states.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A number below `bound`, each equally likely: draws from the incomplete last multiple are thrown away.
uint64_t below(std::mt19937_64& random, uint64_t bound) {
  const uint64_t limit = std::numeric_limits<uint64_t>::max() / bound * bound;
  uint64_t value = random();
  while (value >= limit) value = random();
  return value % bound;
}

}  // namespace

std::vector<int64_t> shuffled_indices(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(mix(mix(seed) ^ static_cast<uint64_t>(epoch)));
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[below(random, i)]);
  return order;
}

TrainSampler::TrainSampler(int64_t num_samples, const BatchShape& shape, uint64_t seed)
    : num_samples_(num_samples), shape_(shape), seed_(seed) {
  if (num_samples < shape.global_batch()) {
    throw ConfigError(str("train_batch_size: ", shape.global_batch(), " samples a step, but the training set has only ",
                          num_samples, "; it must hold at least one global batch"));
  }
  set_epoch(0);
}

void TrainSampler::set_epoch(int64_t epoch) { order_ = shuffled_indices(num_samples_, seed_, epoch); }

std::vector<int64_t> TrainSampler::indices(int64_t step, int64_t micro_step) const {
  TESSERA_CHECK(step >= 0 && step < steps_per_epoch(), "step ", step);
  TESSERA_CHECK(micro_step >= 0 && micro_step < shape_.accumulation_steps, "micro-step ", micro_step);
  const int64_t slice = micro_step * shape_.world_size + shape_.rank;
  const auto begin = order_.begin() + step * shape_.global_batch() + slice * shape_.micro_batch;
  return {begin, begin + shape_.micro_batch};
}

EvalSampler::EvalSampler(int64_t num_samples, int64_t batch_size, int world_size, int rank)
    : num_samples_(num_samples), batch_size_(batch_size), world_size_(world_size), rank_(rank) {
  TESSERA_CHECK(num_samples >= 0 && batch_size > 0 && world_size > 0);
}

int64_t EvalSampler::num_batches() const {
  const int64_t round = batch_size_ * world_size_;
  return (num_samples_ + round - 1) / round;
}

EvalBatch EvalSampler::batch(int64_t index) const {
  TESSERA_CHECK(index >= 0 && index < num_batches(), "evaluation batch ", index);
  const int64_t begin = (index * world_size_ + rank_) * batch_size_;
  EvalBatch batch;
  batch.num_valid = std::clamp<int64_t>(num_samples_ - begin, 0, batch_size_);
  batch.indices.assign(static_cast<size_t>(batch_size_), 0);  // padding: sample 0
  std::iota(batch.indices.begin(), batch.indices.begin() + batch.num_valid, begin);
  return batch;
}

}  // namespace tessera::train
