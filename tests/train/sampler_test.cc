#include "train/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"

namespace tessera::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// All samples of one global step, over ranks and micro-steps, in the order of the epoch.
std::vector<int64_t> global_batch(int64_t num_samples, BatchShape shape, int64_t epoch, int64_t step) {
  std::vector<int64_t> all;
  for (int64_t micro_step = 0; micro_step < shape.accumulation_steps; ++micro_step) {
    for (shape.rank = 0; shape.rank < shape.world_size; ++shape.rank) {
      TrainSampler sampler(num_samples, shape, 7);
      sampler.set_epoch(epoch);
      const auto part = sampler.indices(step, micro_step);
      EXPECT_EQ(static_cast<int64_t>(part.size()), shape.micro_batch);
      all.insert(all.end(), part.begin(), part.end());
    }
  }
  return all;
}

TEST(ShuffledIndices, ArePermutationsThatDependOnSeedAndEpochOnly) {
  const auto order = shuffled_indices(1000, 42, 0);
  EXPECT_EQ(order, shuffled_indices(1000, 42, 0));
  EXPECT_NE(order, shuffled_indices(1000, 42, 1));
  EXPECT_NE(order, shuffled_indices(1000, 43, 0));
  EXPECT_NE(shuffled_indices(1000, 43, 0), shuffled_indices(1000, 42, 1)) << "seed and epoch must not be interchangeable";
  EXPECT_EQ(std::set<int64_t>(order.begin(), order.end()).size(), 1000u);
  EXPECT_EQ(*std::min_element(order.begin(), order.end()), 0);
  EXPECT_EQ(*std::max_element(order.begin(), order.end()), 999);
}

// The order is part of what makes a run reproducible: it may never change with a compiler or a library.
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
  const std::vector<BatchShape> shapes = {{12, 1, 1, 0}, {6, 2, 1, 0}, {6, 1, 2, 0}, {3, 2, 2, 0}, {4, 1, 3, 0},
                                          {1, 3, 4, 0},  {1, 12, 1, 0}, {1, 1, 12, 0}};
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
  try {
    TrainSampler(11, {3, 2, 2, 0}, 7);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("train_batch_size: 12"));
    EXPECT_THAT(error.what(), HasSubstr("only 11"));
  }
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
        EXPECT_EQ(seen, expected) << num_samples << " samples, " << world_size << " ranks, batches of " << batch_size;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::train
