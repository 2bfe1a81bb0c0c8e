// Stages 0 to 3 against a plain libtorch loop on the same global batch, and against each other.
#include <gtest/gtest.h>

#include <map>

#include "core/str.h"
#include "tests/support/losses.h"
#include "tests/support/same_runs.h"

namespace tessera::testing {
namespace {

/// Depends on neither stage nor backend: computed once for each world and case.
template <class Holder>
const TrainingRun& plain_run_once(const Case& c, const LossOf<typename Holder::Impl>& loss_of) {
  static std::map<std::string, TrainingRun> runs;
  const std::string key = str(c.world, " ", c.accumulation, " ", c.steps, " ", c.clipping, " ", c.optimizer);
  const auto place = runs.find(key);
  return place != runs.end() ? place->second : runs[key] = plain_run<Holder>(c, loss_of);
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

TEST_P(Parity, AccumulationAndClipping) {
  Case c = make_case();
  c.accumulation = 2;
  c.clipping = 0.05;
  const TrainingRun& plain = plain_run_once<Mlp>(c, mlp_loss);
  EXPECT_GT(plain.norms.front(), c.clipping) << "the case must clip";
  expect_close(engine_run<Mlp>(c, mlp_loss), plain);
}

TEST_P(Parity, EveryKindOfModule) {
  Case c = make_case();
  c.steps = world() > 2 ? 2 : 3;
  if (world() > 2) c.config.zero.unit_numel = 600;  // a third of the collectives: eight ranks share two cores
  expect_close(engine_run<Zoo>(c, zoo_loss), plain_run_once<Zoo>(c, zoo_loss));
}

TEST_P(Parity, TiedFrozenUnusedAndSometimesUsed) {
  Case c = make_case();
  expect_close(engine_run<Odds>(c, odds_loss), plain_run_once<Odds>(c, odds_loss));
  c.optimizer = "AdamW";
  c.accumulation = 3;
  expect_close(engine_run<Odds>(c, odds_loss), plain_run_once<Odds>(c, odds_loss), /*weights=*/false);
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
      c.steps = 2;
      c.config.zero.reduce_each_micro_step = each;
      if (!each) c.config.zero.unit_numel = 600;
      runs.push_back(each ? engine_run<Odds>(c, odds_loss) : engine_run<Zoo>(c, zoo_loss));
    }
    // In each micro-step stage 0 reduces as stage 1 does, and gathers the sums.
    if (each || first_stage() == 0) expect_same_bits(runs[1], runs[0]);
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
