// The dynamic scale against tables written by DeepSpeed 0.19.8's DynamicLossScaler (deepspeed/runtime/fp16/
// loss_scaler.py), calling update_scale for every letter of a pattern: x is an overflow, a dot is none.
#include "engine/optimizer/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

EngineConfig with(const Fp16Config& fp16) {
  EngineConfig config;
  config.fp16 = fp16;
  return config;
}

EngineConfig dynamic(int power, int64_t window, double minimum, int hysteresis, bool consecutive = false) {
  return with({.enabled = true,
               .initial_scale_power = power,
               .loss_scale_window = window,
               .hysteresis = hysteresis,
               .consecutive_hysteresis = consecutive,
               .min_loss_scale = minimum});
}

/// After each letter of the pattern: the scale is two to the power, and the digit is the hysteresis that is
/// left.
void expect_table(LossScaler scaler, const std::string& pattern, const std::vector<int>& powers,
                  const std::string& hysteresis) {
  ASSERT_EQ(pattern.size(), powers.size());
  ASSERT_EQ(pattern.size(), hysteresis.size());
  for (size_t i = 0; i < pattern.size(); ++i) {
    scaler.update(pattern[i] == 'x');
    EXPECT_EQ(scaler.scale(), std::exp2(powers[i])) << "after update " << i;
    EXPECT_EQ(scaler.state().hysteresis, hysteresis[i] - '0') << "after update " << i;
  }
}

TEST(LossScaler, HysteresisAndWindow) {
  expect_table(
      LossScaler(dynamic(16, 4, 1, 2)), "xx.....x....xx.........x",
      {16, 15, 15, 15, 15, 15, 16, 16, 16, 16, 16, 16, 15, 14, 14, 14, 14, 14, 15, 15, 15, 15, 16, 16},
      "111111211111111111222221");
}

TEST(LossScaler, ConsecutiveHysteresis) {
  expect_table(LossScaler(dynamic(16, 3, 1, 2, true)), "x.x.xx....x...",
               {16, 16, 16, 16, 16, 15, 15, 15, 15, 16, 16, 16, 16, 16}, "12121122221222");
}

TEST(LossScaler, WindowOfOne) {
  expect_table(LossScaler(dynamic(4, 1, 1, 3)), "xxxx..x..xx...", {4, 4, 3, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6},
               "21111322321133");
}

TEST(LossScaler, StopsAtTheMinimum) {
  LossScaler scaler(dynamic(2, 2, 1, 1));
  scaler.update(true);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  scaler.update(false);
  const std::string error = testing::error_of<Error>([&] { scaler.update(true); });
  EXPECT_THAT(error, ::testing::HasSubstr("fp16.min_loss_scale = 1"));
  EXPECT_EQ(error.find('\n'), std::string::npos);
}

TEST(LossScaler, TheMinimumNeedNotBeAPowerOfTwo) {
  LossScaler scaler(dynamic(3, 3, 3, 1));
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 4);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 3);
  EXPECT_THROW(scaler.update(true), Error);
}

TEST(LossScaler, StaticAndDisabledStayPut) {
  EngineConfig config = dynamic(16, 1, 1, 1);
  config.fp16.loss_scale = 128;
  LossScaler fixed(config);
  config.fp16.enabled = false;
  LossScaler disabled(config);
  for (bool overflow : {true, true, false, false, false}) {
    fixed.update(overflow);
    disabled.update(overflow);
  }
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_EQ(disabled.scale(), 1);
}

TEST(LossScaler, ScalesUnderAutocastInFp16AsTheFp16SectionSays) {
  EngineConfig config = with({.enabled = false, .initial_scale_power = 8});
  config.autocast = {.enabled = true, .dtype = DType::kFloat16};
  LossScaler scaler(config);
  EXPECT_EQ(scaler.scale(), 256);
  scaler.update(/*overflow=*/true);
  scaler.update(/*overflow=*/true);
  EXPECT_LT(scaler.scale(), 256) << "the scale is dynamic";
  config.autocast.dtype = DType::kBFloat16;
  EXPECT_EQ(LossScaler(config).scale(), 1);
  config.autocast = {.enabled = false, .dtype = DType::kFloat16};
  EXPECT_EQ(LossScaler(config).scale(), 1);
}

TEST(LossScaler, ContinuesFromItsState) {
  LossScaler whole(dynamic(16, 4, 1, 2));
  LossScaler before(dynamic(16, 4, 1, 2));
  const std::string pattern = "xx.....x....xx.........x";
  for (size_t i = 0; i < pattern.size(); ++i) {
    whole.update(pattern[i] == 'x');
    if (i < 9) before.update(pattern[i] == 'x');
  }
  LossScaler after(dynamic(16, 4, 1, 2));
  after.set_state(before.state());
  for (size_t i = 9; i < pattern.size(); ++i) after.update(pattern[i] == 'x');
  EXPECT_EQ(after.state(), whole.state());
}

TEST(LossScaler, BeginsAnewFromBeforeItsFirstUpdate) {
  LossScaler scaler(dynamic(16, 4, 1, 2));
  const LossScaler::State first = scaler.state();
  for (int i = 0; i < 5; ++i) scaler.update(/*overflow=*/true);
  ASSERT_LT(scaler.scale(), first.scale);
  scaler.set_state(first);
  EXPECT_EQ(scaler.state(), first);
}

TEST(LossScaler, GoesOnFromARunWithoutOneAsFromTheBeginning) {
  LossScaler without(EngineConfig{}), fixed(with({.enabled = true, .loss_scale = 4}));
  for (LossScaler* scaler : {&without, &fixed}) {
    for (int i = 0; i < 3; ++i) scaler->update(false);
    LossScaler dynamic_one(dynamic(16, 4, 1, 2));
    dynamic_one.set_state(scaler->state());
    EXPECT_EQ(dynamic_one.state(), LossScaler(dynamic(16, 4, 1, 2)).state());
  }
}

TEST(LossScaler, ARaisedMinimumHoldsForAnOlderScale) {
  LossScaler before(dynamic(3, 4, 1, 1));
  before.update(true);
  ASSERT_EQ(before.scale(), 4);
  LossScaler after(dynamic(16, 4, 32, 1));
  after.set_state(before.state());
  EXPECT_EQ(after.scale(), 32);
}

TEST(LossScaler, BeginsAtTheMinimumAtLeast) {
  LossScaler scaler(dynamic(2, 1, 32, 1));
  EXPECT_EQ(scaler.scale(), 32);
  EXPECT_THROW(scaler.update(true), Error) << "an overflow raises no scale";
  LossScaler with_hysteresis(dynamic(2, 1, 32, 2));
  with_hysteresis.update(true);
  EXPECT_EQ(with_hysteresis.scale(), 32);
}

}  // namespace
}  // namespace tessera
