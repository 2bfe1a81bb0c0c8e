// Gradients that are not finite, and the loss scale.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/str.h"
#include "tests/support/log_file.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

/// One step. With `overflow`, this rank's gradient of fc2.bias, and of nothing else, is infinite.
void train_or_overflow(TypedEngine<MlpImpl>& engine, int step, bool overflow) {
  at::Tensor loss = step_loss(engine, step);
  if (overflow) loss = loss + engine.module().fc2->bias.sum() * INFINITY;
  engine.backward(loss);
  engine.step();
}

class Overflow : public ::testing::TestWithParam<int> {};  // stage

TEST_P(Overflow, OnOneRankSkipsTheStepOnAll) {
  const LogFile log;
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.optimizer = "AdamW";
    c.config.fp16 = {.enabled = true, .initial_scale_power = 8, .loss_scale_window = 3, .hysteresis = 2};
    auto engine = mlp_engine(c, comm, {.log = log.logger()});
    // Two overflows lower the scale (hysteresis 2); three good steps after the first raise it again.
    const std::vector<bool> overflows{false, true, true, false, false, false, false, false};
    const std::vector<double> scales{256, 256, 128, 128, 128, 128, 256, 256};
    for (size_t step = 0; step < overflows.size(); ++step) {
      SCOPED_TRACE(str("step ", step, " rank ", comm->rank()));
      const Tensors before = full_parameters(*engine);
      const int64_t skipped = engine->skipped_steps();
      train_or_overflow(*engine, static_cast<int>(step), overflows[step] && comm->rank() == 1);
      EXPECT_EQ(engine->skipped_steps() - skipped, overflows[step] ? 1 : 0);
      EXPECT_EQ(engine->global_steps(), static_cast<int64_t>(step) + 1);
      EXPECT_EQ(engine->loss_scale(), scales[step]);
      EXPECT_EQ(std::isinf(engine->gradient_norm()), overflows[step]);
      EXPECT_EQ(bit_equal(full_parameters(*engine), before), overflows[step]);
    }
  });
  const std::string text = log.text();
  EXPECT_THAT(
      text, ::testing::HasSubstr("step 2 skipped: 11 gradient elements are not finite, first in fc2.bias\n"));
  EXPECT_THAT(
      text,
      ::testing::HasSubstr(
          "step 3 skipped: 11 gradient elements are not finite, first in fc2.bias; loss scale 256 -> 128\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << "rank 0 alone talks: " << text;
}

// The schedule moves with the steps that are applied: a skipped one must not
// change the rate of those after it.
TEST_P(Overflow, InFp32AndBf16TooAndTrainingGoesOnAsIfNothingHadBeen) {
  for (const bool bf16 : {false, true}) {
    Tensors with, without;
    for (const bool overflow : {false, true})
      on_ranks(2, [&](comm::CommunicatorPtr comm) {
        Case c = small_units(2, GetParam());
        c.optimizer = "AdamW";
        c.config.bf16 = bf16;
        c.config.scheduler =
            WarmupLrOptions{.warmup_min_lr = {1e-4}, .warmup_max_lr = {0.05}, .warmup = {.num_steps = 10}};
        auto engine = mlp_engine(c, comm);
        for (int step = 0; step < 4; ++step) {
          if (step == 2 && overflow) train_or_overflow(*engine, 77, comm->rank() == 0);
          train_or_overflow(*engine, step, false);
        }
        EXPECT_EQ(engine->skipped_steps(), overflow ? 1 : 0);
        EXPECT_EQ(engine->loss_scale(), 1);
        Tensors parameters = full_parameters(*engine);
        if (comm->rank() == 0) (overflow ? with : without) = std::move(parameters);
      });
    EXPECT_TRUE(bit_equal(with, without))
        << "a skipped step must leave no trace, in Adam's moments and step counts either";
  }
}

TEST_P(Overflow, AtTheSmallestScaleIsAnErrorThatCanBeSurvived) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.config.fp16 = {.enabled = true, .initial_scale_power = 0, .hysteresis = 1};
    auto engine = mlp_engine(c, comm);
    train_or_overflow(*engine, 0, false);
    const Tensors before = full_parameters(*engine);
    const std::string error = error_of([&] { train_or_overflow(*engine, 1, comm->rank() == 1); });
    EXPECT_THAT(error, ::testing::HasSubstr("fp16.min_loss_scale = 1"));
    EXPECT_THAT(error, ::testing::HasSubstr("first in fc2.bias"));
    EXPECT_TRUE(bit_equal(full_parameters(*engine), before));
    EXPECT_EQ(engine->skipped_steps(), 1);
    train_or_overflow(*engine, 2, false);
    EXPECT_FALSE(bit_equal(full_parameters(*engine), before));
    EXPECT_EQ(engine->global_steps(), 3);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Overflow, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

TEST(LossScale, AStaticOneChangesNoNumbersAndClippingIsOfTheUnscaledNorm) {
  const auto run = [](double clipping, bool fp16) {
    Case c = small_units(2, 2);
    c.clipping = clipping;
    c.config.fp16 = {.enabled = fp16, .loss_scale = 1024};
    return fp16 ? engine_run<Mlp>(c, mlp_loss) : plain_run<Mlp>(c, mlp_loss);
  };
  for (const double clipping : {0.05, 100.0}) {
    SCOPED_TRACE(clipping);
    const TrainingRun plain = run(clipping, false), scaled = run(clipping, true);
    EXPECT_EQ(plain.norms.front() > clipping, clipping < 1)
        << "the one is to clip, the other is not, though the scaled norm is above it";
    EXPECT_GT(1024 * plain.norms.front(), clipping);
    EXPECT_LT(largest_difference(scaled.gradients[0], plain.gradients[0]), 2e-3);
    EXPECT_NEAR(scaled.norms[0], plain.norms[0], 2e-3);
    EXPECT_LT(largest_difference(scaled.weights, plain.weights), 3e-3);
  }
  EXPECT_GT(largest_difference(run(0.05, false).weights, run(100, false).weights), 0.02)
      << "or the test shows nothing";
}

TEST(LossScale, OfTwoToTheSixteenDoesNotItselfOverflowAnFp16LossUnderAccumulation) {
  Case c = small_units(1, 0);
  c.accumulation = 4;
  c.steps = 1;
  c.config.fp16 = {.enabled = true};  // 65536, above fp16's largest number
  engine_run<Mlp>(c, mlp_loss, [](Engine& engine, int) {
    EXPECT_EQ(engine.loss_scale(), 65536);
    EXPECT_EQ(engine.skipped_steps(), 0);
  });
}

}  // namespace
}  // namespace tessera::testing
