#include "train/task/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The slices of one step, micro-step by micro-step, and of each by rank.
std::vector<TrainSlice> slices_of(int64_t num_samples, BatchShape shape, int64_t epoch, int64_t first,
                                  const TrainOrder& options = {}) {
  std::vector<TrainSlice> slices;
  for (int64_t micro_step = 0; micro_step < shape.accumulation_steps; ++micro_step)
    for (shape.rank = 0; shape.rank < shape.world_size; ++shape.rank) {
      TrainSampler sampler(num_samples, shape, 7, options);
      sampler.set_epoch(epoch);
      slices.push_back(sampler.slice(first, micro_step));
    }
  return slices;
}

/// All samples of one global step, in the order of the epoch.
std::vector<int64_t> global_batch(int64_t num_samples, const BatchShape& shape, int64_t epoch, int64_t step) {
  std::vector<int64_t> all;
  for (const TrainSlice& part : slices_of(num_samples, shape, epoch, step * shape.global_batch())) {
    EXPECT_EQ(static_cast<int64_t>(part.indices.size()), shape.micro_batch);
    EXPECT_EQ(part.num_samples, shape.micro_batch);
    EXPECT_EQ(part.weight, 1);
    all.insert(all.end(), part.indices.begin(), part.indices.end());
  }
  return all;
}

TEST(ShuffledIndices, ArePermutationsThatDependOnSeedAndEpochOnly) {
  const auto order = shuffled_indices(1000, 42, 0);
  EXPECT_EQ(order, shuffled_indices(1000, 42, 0));
  EXPECT_NE(order, shuffled_indices(1000, 42, 1));
  EXPECT_NE(order, shuffled_indices(1000, 43, 0));
  EXPECT_NE(shuffled_indices(1000, 43, 0), shuffled_indices(1000, 42, 1))
      << "seed and epoch must not be interchangeable";
  EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), 1000u);
  EXPECT_EQ(*std::min_element(order.begin(), order.end()), 0);
  EXPECT_EQ(*std::max_element(order.begin(), order.end()), 999);
}

// Runs are reproducible only if the order never changes with the compiler or the library.
TEST(ShuffledIndices, AreTheSameEverywhereAndForever) {
  EXPECT_THAT(shuffled_indices(10, 42, 0), ElementsAre(2, 0, 4, 7, 8, 3, 5, 1, 9, 6));
  EXPECT_THAT(shuffled_indices(10, 42, 1), ElementsAre(2, 8, 7, 3, 6, 4, 0, 9, 5, 1));
}

TEST(ShuffledIndices, AreUniform) {
  // Each of the 24 orders of 4 things, over 24000 epochs: 1000 times each, +- 6 standard deviations.
  std::map<std::vector<int64_t>, int> counts;
  for (int64_t epoch = 0; epoch < 24000; ++epoch) ++counts[shuffled_indices(4, 1, epoch)];
  EXPECT_EQ(counts.size(), 24u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 190);
}

TEST(ShuffledIndices, HandlesTheSmallest) {
  EXPECT_TRUE(shuffled_indices(0, 1, 0).empty());
  EXPECT_THAT(shuffled_indices(1, 1, 0), ElementsAre(0));
}

TEST(TrainSampler, GlobalBatchDoesNotDependOnWorldSizeOrMicroBatch) {
  const std::vector<BatchShape> shapes = {{12, 1, 1, 0}, {6, 2, 1, 0}, {6, 1, 2, 0},  {3, 2, 2, 0},
                                          {4, 1, 3, 0},  {1, 3, 4, 0}, {1, 12, 1, 0}, {1, 1, 12, 0}};
  for (int64_t epoch : {0, 3}) {
    for (int64_t step = 0; step < 8; ++step) {
      const auto expected = global_batch(100, shapes[0], epoch, step);
      for (const BatchShape& shape : shapes) EXPECT_EQ(global_batch(100, shape, epoch, step), expected);
    }
  }
}

TEST(TrainSampler, EpochIsAPartitionWithTheRemainderDropped) {
  const BatchShape shape{3, 2, 2, 0};
  const TrainSampler sampler(100, shape, 7);
  EXPECT_EQ(sampler.steps_per_epoch(), 8);
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 8; ++step) {
    for (int64_t index : global_batch(100, shape, 0, step)) {
      EXPECT_TRUE(seen.insert(index).second) << index << " twice";
      EXPECT_TRUE(index >= 0 && index < 100);
    }
  }
  EXPECT_EQ(seen.size(), 96u);
}

TEST(TrainSampler, RefusesFewerSamplesThanOneBatch) {
  EXPECT_EQ(TrainSampler(12, {3, 2, 2, 0}, 7).steps_per_epoch(), 1);
  EXPECT_THAT(tessera::testing::error_of<ConfigError>([] { TrainSampler(11, {3, 2, 2, 0}, 7); }),
              AllOf(HasSubstr("train_batch_size: 12"), HasSubstr("only 11")));
}

// The mean of the weighted slices is the mean of the step; each sample is used once,
// in the order of the epoch, also when starting within it.
TEST(TrainSampler, TheRestOfAnEpochIsAStepOfItsOwn) {
  for (int64_t num_samples : {1, 2, 5, 12, 23, 24, 25, 29, 100}) {
    for (const BatchShape& shape :
         std::vector<BatchShape>{{12, 1, 1, 0}, {3, 2, 2, 0}, {1, 3, 4, 0}, {4, 1, 3, 0}}) {
      SCOPED_TRACE(::testing::Message()
                   << num_samples << " samples, " << shape.accumulation_steps << " x " << shape.world_size);
      EXPECT_EQ(TrainSampler(num_samples, shape, 7, {.drop_last = false}).steps_per_epoch(),
                (num_samples + 11) / 12);
      for (const int64_t start : {int64_t{0}, num_samples / 2}) {
        std::vector<int64_t> seen;
        int64_t size = 0;
        for (int64_t first = start;; first += size) {
          size = TrainSampler(num_samples, shape, 7, {.drop_last = false}).step_size(first);
          if (size == 0) break;
          EXPECT_EQ(size, std::min<int64_t>(12, num_samples - first));
          double weights = 0;
          for (const TrainSlice& slice : slices_of(num_samples, shape, 2, first, {.drop_last = false})) {
            ASSERT_EQ(static_cast<int64_t>(slice.indices.size()), std::max<int64_t>(slice.num_samples, 1));
            EXPECT_LE(slice.num_samples, shape.micro_batch);
            EXPECT_DOUBLE_EQ(
                slice.weight * static_cast<double>(size),
                static_cast<double>(slice.num_samples * shape.accumulation_steps * shape.world_size));
            weights += slice.weight;
            seen.insert(seen.end(), slice.indices.begin(), slice.indices.begin() + slice.num_samples);
          }
          EXPECT_DOUBLE_EQ(weights, static_cast<double>(shape.accumulation_steps * shape.world_size));
        }
        const std::vector<int64_t> order = shuffled_indices(num_samples, 7, 2);
        EXPECT_EQ(seen, std::vector<int64_t>(order.begin() + start, order.end()));
      }
    }
  }
  EXPECT_THROW(TrainSampler(0, {3, 2, 2, 0}, 7, {.drop_last = false}), ConfigError);
}

// Rank 0's buffers are broadcast: its batch norm must not see a sample with weight 0
// while there are others.
TEST(TrainSampler, WithoutEnoughSamplesTheLastSlicesAreEmpty) {
  for (const int64_t rest : {1, 2, 3, 5}) {
    std::vector<int64_t> counts;
    for (const TrainSlice& slice :
         slices_of(12 + rest, {.micro_batch = 2, .accumulation_steps = 2, .world_size = 3}, 0, 12,
                   {.drop_last = false}))
      counts.push_back(slice.num_samples);
    EXPECT_EQ(counts.front(), 1);
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), rest);
    EXPECT_EQ(counts.back(), 0) << rest << " samples in 6 slices";
  }
}

TEST(TrainSampler, WithoutShuffleEveryEpochIsTheOrderOfTheSet) {
  TrainSampler sampler(10, {.micro_batch = 2, .accumulation_steps = 2}, 7, {.shuffle = false});
  for (const int64_t epoch : {0, 1, 5}) {
    sampler.set_epoch(epoch);
    EXPECT_EQ(sampler.slice(0, 0).indices, (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(sampler.slice(4, 1).indices, (std::vector<int64_t>{6, 7}));
  }
}

// For any division of a step, the mean of its weighted slices is the weighted mean of its samples; an empty
// slice has weight 0.
TEST(TrainSampler, SlicesAreWeightedByWhatCountsInThem) {
  std::vector<float> weights, losses;
  for (int i = 0; i < 31; ++i)
    weights.push_back(i % 3 == 0 ? 0.0f : static_cast<float>(i % 5) / 2),
        losses.push_back(static_cast<float>((i * 7) % 13));
  const auto shared = std::make_shared<const std::vector<float>>(weights);
  const std::vector<int64_t> order = shuffled_indices(31, 7, 1);
  for (BatchShape shape : std::vector<BatchShape>{{12, 1, 1, 0}, {3, 2, 2, 0}, {1, 3, 4, 0}, {4, 1, 3, 0}}) {
    for (const int64_t first : {0, 12, 24}) {  // the last step has 7 samples
      const int64_t size = std::min<int64_t>(12, 31 - first);
      double sum = 0, all = 0;
      for (int64_t i = first; i < first + size; ++i) {
        const auto sample = static_cast<size_t>(order[static_cast<size_t>(i)]);
        sum += weights[sample] * losses[sample], all += weights[sample];
      }
      ASSERT_GT(all, 0);
      double mean = 0;
      for (const TrainSlice& slice :
           slices_of(31, shape, 1, first, {.drop_last = false, .weights = shared})) {
        double slice_sum = 0, slice_all = 0;
        for (int64_t i = 0; i < slice.num_samples; ++i) {
          const auto sample = static_cast<size_t>(slice.indices[static_cast<size_t>(i)]);
          slice_sum += weights[sample] * losses[sample], slice_all += weights[sample];
        }
        EXPECT_EQ(slice.weight == 0, slice_all == 0);
        if (slice_all > 0) mean += slice.weight * slice_sum / slice_all;
      }
      mean /= static_cast<double>(shape.accumulation_steps * shape.world_size);
      EXPECT_NEAR(mean, sum / all, 1e-12)
          << first << " " << shape.accumulation_steps << " x " << shape.world_size;
    }
  }
  const auto none = std::make_shared<const std::vector<float>>(12, 0.0f);
  TrainSampler sampler(12, {12, 1, 1, 0}, 7, {.weights = none});
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.slice(0, 0).weight, 0) << "all weights in the step are 0";
}

TEST(AugmentationSeed, IsAnotherForEveryMicroStepOfEveryRank) {
  std::set<uint64_t> seeds;
  for (uint64_t seed : {0, 1, 42})
    for (int64_t epoch : {0, 1})
      for (int64_t first : {0, 48, 96})
        for (int64_t micro_step : {0, 1, 2})
          for (int rank : {0, 1, 2}) seeds.insert(augmentation_seed(seed, epoch, first, micro_step, rank));
  EXPECT_EQ(seeds.size(), 3u * 2 * 3 * 3 * 3);
  EXPECT_EQ(augmentation_seed(42, 1, 48, 1, 2), augmentation_seed(42, 1, 48, 1, 2));
}

TEST(Parts, AreTheSameEverywhereAndHoldEverySampleOnce) {
  const Parts parts = split_into_parts(17, {.validation_fraction = 0.2, .test_fraction = 0.1, .seed = 0});
  EXPECT_EQ(parts.test.size(), 1u);
  EXPECT_EQ(parts.validation.size(), 3u);
  EXPECT_EQ(parts.train.size(), 13u);
  EXPECT_THAT(parts.test, ElementsAre(15)) << "equal on every machine";
  EXPECT_THAT(parts.validation, ElementsAre(2, 5, 7));
  std::vector<int64_t> all = parts.train;
  all.insert(all.end(), parts.validation.begin(), parts.validation.end());
  all.insert(all.end(), parts.test.begin(), parts.test.end());
  std::sort(all.begin(), all.end());
  for (int64_t i = 0; i < 17; ++i) EXPECT_EQ(all.at(static_cast<size_t>(i)), i);

  EXPECT_NE(split_into_parts(17, {.seed = 1}).train, split_into_parts(17, {.seed = 0}).train);
  const Parts whole = split_into_parts(5, {.validation_fraction = 0, .test_fraction = 0});
  EXPECT_EQ(whole.train.size(), 5u);
  EXPECT_TRUE(whole.validation.empty() && whole.test.empty());
}

TEST(EvalSampler, EachSampleOnceWhateverTheWorld) {
  for (int64_t num_samples : {0, 1, 9, 10, 11, 64, 101}) {
    for (int world_size : {1, 2, 3, 8}) {
      for (int64_t batch_size : {1, 4, 200}) {
        std::vector<int64_t> seen;
        const int64_t num_batches = EvalSampler(num_samples, batch_size, world_size, 0).num_batches();
        for (int64_t i = 0; i < num_batches; ++i) {
          for (int rank = 0; rank < world_size; ++rank) {
            const EvalSampler sampler(num_samples, batch_size, world_size, rank);
            ASSERT_EQ(sampler.num_batches(), num_batches) << "ranks must call forward equally often";
            const EvalBatch batch = sampler.batch(i);
            ASSERT_EQ(static_cast<int64_t>(batch.indices.size()), batch_size);
            for (int64_t index : batch.indices) ASSERT_TRUE(index >= 0 && index < num_samples);
            seen.insert(seen.end(), batch.indices.begin(), batch.indices.begin() + batch.num_valid);
          }
        }
        std::vector<int64_t> expected(static_cast<size_t>(num_samples));
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(seen, expected) << num_samples << " samples, " << world_size << " ranks, batches of "
                                  << batch_size;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::train
