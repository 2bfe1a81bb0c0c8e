// Model state where the allocator's blocks are larger than the tensors in them, as CUDA's are: what the meter
// counts is the formula and the rounding, which has a bound.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "comm/init/self.h"
#include "core/str.h"
#include "engine/profile/memory_meter.h"
#include "tests/support/backend.h"
#include "tests/support/cuda_blocks.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

using torch::nn::Linear;
using torch::nn::Sequential;

// Blocks of up to 1 MiB are cut to a multiple of 512 bytes; of larger ones up to 1 MiB is not cut off.
TEST(CudaBlocks, AreWhatTheCachingAllocatorGives) {
  constexpr int64_t kMiB = 1 << 20;
  CudaBlocks blocks(/*expandable=*/false);
  EXPECT_EQ(blocks.take(1).second, 512);
  EXPECT_EQ(blocks.take(512).second, 512);
  EXPECT_EQ(blocks.take(513).second, 1024);
  EXPECT_EQ(blocks.reserved(), 2 * kMiB);
  const auto [address, size] = blocks.take(16'000'000);
  EXPECT_EQ(size, 16 * kMiB) << "what is left of its segment, 0.74 MiB, stays with it";
  EXPECT_EQ(blocks.reserved(), 18 * kMiB);
  EXPECT_EQ(blocks.give_back(address), 16 * kMiB);
  EXPECT_EQ(blocks.take(3 * kMiB).second, 3 * kMiB) << "of what was given back";
  EXPECT_EQ(blocks.take(12 * kMiB).second, 13 * kMiB);
  EXPECT_EQ(blocks.reserved(), 18 * kMiB);
  EXPECT_EQ(blocks.allocated(), 16 * kMiB + 2048);
  EXPECT_EQ(CudaBlocks(/*expandable=*/true).take(16'000'001).second, 16'000'512);
}

/// 200 parameters of at most 16 KiB: 416,000 elements.
Sequential many_small() {
  Sequential model;
  for (int i = 0; i < 100; ++i) model->push_back(Linear(64, 64));
  return model;
}

/// Four parameters of 4,096,000 and 1,024,000 elements with their biases.
Sequential few_large() { return Sequential(Linear(1000, 4096), Linear(4096, 250)); }

struct Measured {
  MemoryBytes held;
  zero::StateBytes state, formula;
  int num_units = 0;
  int64_t reserved = 0;
};

Measured train_measured(Sequential model, int64_t inputs, int world, int stage, bool bf16, bool expandable) {
  Case c;
  c.world = world;
  c.config.zero.stage = stage;
  c.config.zero.param_persistence_threshold = 0;
  c.config.bf16 = bf16;
  c.optimizer = "AdamW";
  const ReportedAsCuda reported(expandable);
  MemoryMeter meter(at::kCUDA);
  const auto engine =
      initialize(model, engine_config(c),
                 std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{.rank = 0, .size = world}));
  engine->backward(engine->forward(at::ones({2, inputs})).to(at::kFloat).square().mean());
  engine->step();
  EXPECT_EQ(meter.peak_reserved(), reported.blocks().reserved()) << "it only grows";
  EXPECT_GE(meter.peak_reserved(), meter.peak().total());
  return {meter.now(), engine->measured_bytes(), engine->formula_bytes(),
          engine->sharded_model().layout().num_units(), meter.peak_reserved()};
}

int64_t state_held(const MemoryBytes& held) {
  return held[MemoryUse::kParameters] + held[MemoryUse::kGradients] + held[MemoryUse::kMaster] +
         held[MemoryUse::kOptimizer];
}

class RoundedBlocks : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  void check(const Measured& measured, int64_t most_a_block) const {
    EXPECT_EQ(measured.state, measured.formula);
    const int64_t rounding = state_held(measured.held) - measured.state.total();
    EXPECT_GE(rounding, 0);
    // Values, gradient, master and two moments of a unit.
    EXPECT_LE(rounding, 5 * measured.num_units * most_a_block);
    EXPECT_GE(measured.held[MemoryUse::kParameters], measured.state.parameters);
    EXPECT_GE(measured.held[MemoryUse::kGradients], measured.state.gradients);
    EXPECT_GE(measured.held[MemoryUse::kMaster], measured.state.master);
    EXPECT_GE(measured.held[MemoryUse::kOptimizer], measured.state.optimizer);
  }
  static double excess(const Measured& measured) {
    return static_cast<double>(state_held(measured.held)) / static_cast<double>(measured.formula.total()) - 1;
  }
  static constexpr int64_t kSmallest = 511, kLarge = (1 << 20) + 511;
};

TEST_P(RoundedBlocks, StateIsTheFormulaAndTheRounding) {
  TESSERA_ON_ONE_BACKEND();
  const auto& [stage, bf16] = GetParam();
  const Measured small = train_measured(many_small(), 64, 3, stage, bf16, /*expandable=*/false);
  EXPECT_EQ(small.num_units, 1) << "small parameters share a unit";
  check(small, kSmallest);
  EXPECT_LT(excess(small), 0.01);

  check(train_measured(few_large(), 1000, 3, stage, bf16, /*expandable=*/false), kLarge);
  const Measured expandable = train_measured(few_large(), 1000, 3, stage, bf16, /*expandable=*/true);
  check(expandable, kSmallest);
  EXPECT_LT(excess(expandable), 0.001);
}

INSTANTIATE_TEST_SUITE_P(Stages, RoundedBlocks, ::testing::Combine(::testing::Range(0, 4), ::testing::Bool()),
                         [](const auto& info) {
                           return str("Stage", std::get<0>(info.param),
                                      std::get<1>(info.param) ? "Bf16" : "Fp32");
                         });

// Why the rounding has a line of its own: with units of 16.4 MB blocks alone exceed the formula by more.
TEST(RoundedBlocks, OfAFewMegabytesExceedTheFormulaByMoreThanAPercent) {
  TESSERA_ON_ONE_BACKEND();
  const Measured measured = train_measured(few_large(), 1000, 1, 2, /*bf16=*/false, /*expandable=*/false);
  EXPECT_GT(static_cast<double>(state_held(measured.held)),
            1.01 * static_cast<double>(measured.formula.total()));
}

}  // namespace
}  // namespace tessera::testing
