#include "train/task/sampler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "core/check.h"
#include "core/error.h"

namespace tessera::train {
namespace {

/// splitmix64's finalizer: similar (seed, epoch) pairs give unrelated generator states.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// A uniform number below `bound`: draws from the incomplete last multiple of `bound` are rejected.
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

Parts split_into_parts(int64_t size, const PartsOptions& options) {
  const std::vector<int64_t> order = shuffled_indices(size, options.seed, 0);
  const auto share = [&](double fraction) {
    return static_cast<int64_t>(fraction * static_cast<double>(size));
  };
  const auto test = order.begin() + share(options.test_fraction);
  const auto validation = test + share(options.validation_fraction);
  return {
      .train = {validation, order.end()}, .validation = {test, validation}, .test = {order.begin(), test}};
}

uint64_t augmentation_seed(uint64_t seed, int64_t epoch, int64_t first, int64_t micro_step, int rank) {
  uint64_t mixed = mix(seed);
  for (const int64_t number : {epoch, first, micro_step, static_cast<int64_t>(rank)})
    mixed = mix(mixed ^ static_cast<uint64_t>(number));
  return mixed;
}

TrainSampler::TrainSampler(int64_t num_samples, const BatchShape& shape, uint64_t seed, TrainOrder order)
    : num_samples_(num_samples), shape_(shape), seed_(seed), order_options_(std::move(order)) {
  TESSERA_CHECK(!order_options_.weights ||
                static_cast<int64_t>(order_options_.weights->size()) == num_samples);
  if (step_size(0) > 0) return;
  if (num_samples == 0) throw ConfigError("data: the training set is empty; expected at least one sample");
  throw ConfigError("train_batch_size: ", shape.global_batch(),
                    " samples a step, but the training set has only ", num_samples,
                    "; it must hold at least one global batch (or trainer.dataloader_drop_last be false)");
}

int64_t TrainSampler::steps_remaining(int64_t first) const {
  const int64_t left = std::max<int64_t>(num_samples_ - first, 0), batch = shape_.global_batch();
  return left / batch + (!order_options_.drop_last && left % batch != 0 ? 1 : 0);
}

int64_t TrainSampler::samples_per_epoch() const {
  return order_options_.drop_last ? steps_per_epoch() * shape_.global_batch() : num_samples_;
}

int64_t TrainSampler::step_size(int64_t first) const {
  const int64_t left = std::max<int64_t>(num_samples_ - first, 0), batch = shape_.global_batch();
  if (left >= batch) return batch;
  return order_options_.drop_last ? 0 : left;
}

void TrainSampler::set_epoch(int64_t epoch) {
  if (order_options_.shuffle) {
    order_ = shuffled_indices(num_samples_, seed_, epoch);
  } else if (order_.empty()) {
    order_.resize(static_cast<size_t>(num_samples_));
    std::iota(order_.begin(), order_.end(), 0);
  }
}

/// The sum of the weights of the epoch's samples from `begin` to `end`.
double TrainSampler::weight_of(int64_t begin, int64_t end) const {
  if (!order_options_.weights) return static_cast<double>(end - begin);
  double sum = 0;
  for (int64_t i = begin; i < end; ++i)
    sum += (*order_options_.weights)[static_cast<size_t>(order_[static_cast<size_t>(i)])];
  return sum;
}

TrainSlice TrainSampler::slice(int64_t first, int64_t micro_step) const {
  const int64_t size = step_size(first);
  TESSERA_CHECK(!order_.empty() && first >= 0 && size > 0, "step at sample ", first);
  TESSERA_CHECK(micro_step >= 0 && micro_step < shape_.accumulation_steps, "micro-step ", micro_step);
  const int64_t num_slices = shape_.accumulation_steps * shape_.world_size;
  const int64_t number = micro_step * shape_.world_size + shape_.rank;
  // Rounded up, so that in a step with fewer samples than slices the last slices are the empty ones: rank 0,
  // whose buffers are broadcast, always has samples.
  const auto edge = [&](int64_t slice) { return (slice * size + num_slices - 1) / num_slices; };
  const int64_t begin = edge(number), end = edge(number + 1);
  TrainSlice slice;
  slice.num_samples = end - begin;
  const double all = weight_of(first, first + size);  // 0 if all samples of the step have weight 0
  slice.weight = all > 0 ? weight_of(first + begin, first + end) * static_cast<double>(num_slices) / all : 0;
  const auto samples =
      order_.begin() + first + std::min(begin, size - 1);  // an empty slice gets one sample, with weight 0
  slice.indices = {samples, samples + std::max<int64_t>(slice.num_samples, 1)};
  return slice;
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
