#include "train/run/run_length.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera::train {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

TrainerConfig epochs(int64_t count) {
  TrainerConfig trainer;
  trainer.epochs = count;
  return trainer;
}

// 50 samples in batches of 12: 4 steps per epoch, or 5 with the last 2 samples.
TrainSampler sampler(bool drop_last, int64_t batch = 12) {
  return TrainSampler(50, {.micro_batch = batch}, 1, {.drop_last = drop_last});
}

Position after_six_steps() {  // at 12 samples a step
  Position position;
  position.steps_done = 6;
  position.data = {.epoch = 1, .samples_into_epoch = 24};
  return position;
}

TEST(RunLength, DueAfterEverySoMany) {
  EXPECT_TRUE(is_due(6, 3));
  EXPECT_FALSE(is_due(7, 3));
  EXPECT_FALSE(is_due(0, 3)) << "nothing has been done yet";
  EXPECT_FALSE(is_due(6, 0)) << "never";
}

TEST(RunLength, OfEpochsOrOfSteps) {
  EXPECT_EQ(total_steps(epochs(3), sampler(true)), 12);
  EXPECT_EQ(total_steps(epochs(3), sampler(false)), 15);
  TrainerConfig steps = epochs(0);
  steps.max_steps = 7;
  EXPECT_EQ(total_steps(steps, sampler(true)), 7);
  EXPECT_EQ(total_steps(steps, sampler(true), after_six_steps()), 7);
}

TEST(RunLength, AnotherBatchSizeLeavesOtherSteps) {
  const Position begun = after_six_steps();
  EXPECT_EQ(total_steps(epochs(3), sampler(true), begun), 6 + 2 + 4) << "as without the interruption";
  EXPECT_EQ(total_steps(epochs(3), sampler(true, 5), begun), 6 + 5 + 10);
  EXPECT_EQ(total_steps(epochs(3), sampler(false, 20), begun), 6 + 2 + 3);
  EXPECT_EQ(total_steps(epochs(2), sampler(true, 5), begun), 6 + 5);
  EXPECT_EQ(total_steps(epochs(1), sampler(true, 5), begun), 6) << "fewer epochs are done already";
}

TEST(RunLength, MoreThanCanBeCounted) {
  EXPECT_THAT(error_of<ConfigError>([] { total_steps(epochs(9'000'000'000'000'000'000), sampler(true)); }),
              HasSubstr("trainer.epochs: found 9000000000000000000"));
}

}  // namespace
}  // namespace tessera::train
