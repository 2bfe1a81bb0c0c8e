// Stages 0 to 3 against a plain libtorch loop on the same global batch, and against each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

constexpr double kTolerance = 1e-5;

void expect_same(const TrainingRun& run, const TrainingRun& plain, bool weights) {
  ASSERT_EQ(run.losses.size(), plain.losses.size());
  for (size_t step = 0; step < plain.losses.size(); ++step) {
    EXPECT_NEAR(run.losses[step], plain.losses[step], kTolerance) << "step " << step;
    EXPECT_NEAR(run.norms[step], plain.norms[step], kTolerance * (1 + plain.norms[step])) << "step " << step;
    EXPECT_LT(largest_difference(run.gradients[step], plain.gradients[step]), kTolerance) << "step " << step;
  }
  if (weights) {
    EXPECT_LT(largest_difference(run.weights, plain.weights), kTolerance);
  }
}

class Parity : public ::testing::TestWithParam<std::tuple<std::string, int, int>> {
 protected:
  int world() const { return std::get<1>(GetParam()); }
  Case make_case() const {
    Case c = small_units(world(), std::get<2>(GetParam()));
    c.backend = std::get<0>(GetParam());
    return c;
  }
};

TEST_P(Parity, MlpSgd) {
  Case c = make_case();
  expect_same(engine_run<Mlp>(c, mlp_loss), plain_run<Mlp>(c, mlp_loss), /*weights=*/true);
}

TEST_P(Parity, MlpAdamWithAccumulationAndClipping) {
  Case c = make_case();
  c.optimizer = "AdamW";
  c.accumulation = 3;
  c.clipping = 0.05;
  const TrainingRun plain = plain_run<Mlp>(c, mlp_loss);
  EXPECT_GT(plain.norms.front(), c.clipping) << "the case must clip";
  expect_same(engine_run<Mlp>(c, mlp_loss), plain, /*weights=*/false);
}

TEST_P(Parity, SgdWithAccumulationAndClipping) {
  Case c = make_case();
  c.accumulation = 2;
  c.clipping = 0.05;
  expect_same(engine_run<Mlp>(c, mlp_loss), plain_run<Mlp>(c, mlp_loss), /*weights=*/true);
}

TEST_P(Parity, EveryKindOfModule) {
  Case c = make_case();
  c.steps = world() > 2 ? 2 : 3;
  if (world() > 2) c.config.zero.unit_numel = 600;  // a third of the collectives: eight ranks share two cores
  expect_same(engine_run<Zoo>(c, zoo_loss), plain_run<Zoo>(c, zoo_loss), /*weights=*/true);
}

TEST_P(Parity, TiedFrozenUnusedAndSometimesUsed) {
  Case c = make_case();
  expect_same(engine_run<Odds>(c, odds_loss), plain_run<Odds>(c, odds_loss), /*weights=*/true);
  c.optimizer = "AdamW";
  c.accumulation = 2;
  expect_same(engine_run<Odds>(c, odds_loss), plain_run<Odds>(c, odds_loss), /*weights=*/false);
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<std::string, int, int>>& info) {
  return str(std::get<0>(info.param), "World", std::get<1>(info.param), "Stage", std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(WorldsAndStages, Parity,
                         ::testing::Combine(::testing::Values("gloo"), ::testing::Values(1, 2, 3, 5),
                                            ::testing::Values(0, 1, 2, 3)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(InSharedMemory, Parity,
                         ::testing::Combine(::testing::Values("shm"), ::testing::Values(2, 3, 8),
                                            ::testing::Values(0, 1, 2, 3)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(OnTwoHosts, Parity,
                         ::testing::Combine(::testing::Values("hybrid"), ::testing::Values(2, 3, 5),
                                            ::testing::Values(0, 1, 2, 3)),
                         name_of_case);

void expect_same_bits(const TrainingRun& a, const TrainingRun& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  for (size_t step = 0; step < a.gradients.size(); ++step)
    EXPECT_TRUE(bit_equal(a.gradients[step], b.gradients[step])) << step;
  EXPECT_TRUE(bit_equal(a.weights, b.weights));
}

class SameBits : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  Case make_case(int stage) const {
    Case c = small_units(std::get<1>(GetParam()), stage);
    c.backend = std::get<0>(GetParam());
    return c;
  }
  /// Of those whose sums have one order: stage 0's all-reduce is Gloo's own, with
  /// an order of its own beyond two ranks.
  int first_stage() const { return std::get<0>(GetParam()) == "gloo" && std::get<1>(GetParam()) > 2 ? 1 : 0; }
};

TEST_P(SameBits, AtEveryStage) {
  for (const bool bf16 : {false, true}) {
    SCOPED_TRACE(bf16 ? "bf16" : "fp32");
    std::vector<TrainingRun> runs;
    for (int stage = 0; stage <= 3; ++stage) {
      Case c = make_case(stage);
      c.optimizer = "AdamW";
      c.clipping = 0.05;
      c.config.bf16 = bf16;
      runs.push_back(engine_run<Mlp>(c, mlp_loss));
    }
    for (int stage = first_stage() + 1; stage <= 3; ++stage) {
      SCOPED_TRACE(stage);
      expect_same_bits(runs[stage], runs[first_stage()]);
    }
  }
}

TEST_P(SameBits, WithAccumulationWithinPairsOfStages) {
  for (const bool each : {false, true}) {
    std::vector<TrainingRun> runs;
    for (int stage = 0; stage <= 3; ++stage) {
      Case c = make_case(stage);
      c.accumulation = 3;
      c.steps = 3;
      c.config.zero.unit_numel = 400;
      c.config.zero.reduce_each_micro_step = each;
      runs.push_back(engine_run<Zoo>(c, zoo_loss));
    }
    const int first =
        each ? 0 : first_stage();  // in each micro-step stage 0 reduces as stage 1 does, and gathers the sums
    if (first == 0) expect_same_bits(runs[1], runs[0]);
    expect_same_bits(runs[3], runs[2]);
    if (each) expect_same_bits(runs[2], runs[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SameBits,
                         ::testing::Combine(::testing::Values("gloo"), ::testing::Values(1, 2, 3)));
INSTANTIATE_TEST_SUITE_P(InSharedMemory, SameBits,
                         ::testing::Combine(::testing::Values("shm"), ::testing::Values(2, 3, 8)));
INSTANTIATE_TEST_SUITE_P(OnTwoHosts, SameBits,
                         ::testing::Combine(::testing::Values("hybrid"), ::testing::Values(2, 3, 5)));

}  // namespace
}  // namespace tessera::testing
