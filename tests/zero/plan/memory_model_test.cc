// The bytes a rank holds: the table of docs/architecture.md, for Adam, in bytes a parameter.
#include "zero/plan/memory_model.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::zero {
namespace {

constexpr int64_t kNumel = 16'384;  // divides by 4 ranks x 64 bytes: no padding
constexpr int kWorld = 4;

Layout layout_of(DType dtype, bool frozen_too = false) {
  std::vector<ParameterSpec> specs{
      {.name = "w", .shape = {kNumel}, .dtype = dtype, .trainable = true, .group = 0, .aliases = {}}};
  if (frozen_too)
    specs.push_back(
        {.name = "frozen", .shape = {kNumel}, .dtype = dtype, .trainable = false, .group = 0, .aliases = {}});
  return Layout(specs, {.world_size = kWorld, .unit_numel = kNumel});
}

StateBytes per_parameter(const StateBytes& bytes) {
  return {bytes.parameters / kNumel, bytes.gradients / kNumel, bytes.master / kNumel,
          bytes.optimizer / kNumel};
}

StateBytes at_stage(int stage, DType dtype, DType accumulate = DType::kFloat32) {
  return per_parameter(model_state_bytes(
      layout_of(dtype), {.sharding = sharding_of(stage), .accumulate_dtype = accumulate, .num_states = 2}));
}

TEST(MemoryModel, Fp32) {
  EXPECT_EQ(at_stage(0, DType::kFloat32), (StateBytes{4, 4, 0, 8}));
  EXPECT_EQ(at_stage(1, DType::kFloat32), (StateBytes{4, 4, 0, 2}));
  EXPECT_EQ(at_stage(2, DType::kFloat32), (StateBytes{4, 1, 0, 2}));
  EXPECT_EQ(at_stage(3, DType::kFloat32), (StateBytes{1, 1, 0, 2}));
}

TEST(MemoryModel, Bf16WithFp32Gradients) {
  EXPECT_EQ(at_stage(0, DType::kBFloat16), (StateBytes{2, 4, 4, 8}));
  EXPECT_EQ(at_stage(1, DType::kBFloat16), (StateBytes{2, 4, 1, 2}));
  EXPECT_EQ(at_stage(2, DType::kBFloat16), (StateBytes{2, 1, 1, 2}));
  const Layout layout = layout_of(DType::kBFloat16);
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(3)}).total(), (2 + 4 + 12) * kNumel / kWorld);
}

TEST(MemoryModel, Bf16WithBf16Gradients) {
  EXPECT_EQ(at_stage(0, DType::kBFloat16, DType::kBFloat16), (StateBytes{2, 2, 4, 8}));
  EXPECT_EQ(at_stage(0, DType::kBFloat16, DType::kBFloat16).total(), 16);
}

TEST(MemoryModel, FrozenParametersCostThemselvesOnly) {
  const Layout layout = layout_of(DType::kFloat32, /*frozen_too=*/true);
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(0)}),
            (StateBytes{8 * kNumel, 4 * kNumel, 0, 8 * kNumel}));
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(3)}).parameters, 8 * kNumel / kWorld);
}

TEST(MemoryModel, CountsPadding) {
  const Layout layout(
      {{.name = "w", .shape = {1}, .dtype = DType::kFloat32, .trainable = true, .group = 0, .aliases = {}}},
      {.world_size = 2});
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(0), .num_states = 0}),
            (StateBytes{128, 128, 0, 0}));
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(3), .num_states = 0}),
            (StateBytes{64, 64, 0, 0}));
}

// Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, mixed
// precision, Adam, in units of 1e9 bytes.
TEST(MemoryModel, TheTableOfTheZeroPaper) {
  const double expected[] = {120, 31.4, 16.6, 1.9};
  for (int stage = 0; stage <= 3; ++stage) {
    const StateBytes bytes =
        estimate_state_bytes(7'500'000'000, 64, DType::kBFloat16,
                             {.sharding = sharding_of(stage), .accumulate_dtype = DType::kBFloat16});
    EXPECT_EQ(std::round(bytes.total() / 1e8) / 10, expected[stage]) << "stage " << stage;
  }
}

TEST(MemoryModel, AnEstimateIsTheLayoutsNumberButForPadding) {
  const Layout layout = layout_of(DType::kBFloat16);
  for (int stage = 0; stage <= 3; ++stage) {
    const StateModel model{.sharding = sharding_of(stage)};
    EXPECT_EQ(estimate_state_bytes(kNumel, kWorld, DType::kBFloat16, model),
              model_state_bytes(layout, model));
  }
}

TEST(MemoryModel, TheSmallestWorldThatFits) {
  constexpr int64_t kBudget = int64_t{80} << 30;
  const auto smallest = [](int stage, int64_t budget) {
    return smallest_world(7'500'000'000, DType::kBFloat16,
                          {.sharding = sharding_of(stage), .accumulate_dtype = DType::kBFloat16}, budget);
  };
  EXPECT_EQ(smallest(0, kBudget), 0) << "120 GB in any world";
  EXPECT_EQ(smallest(0, 120'000'000'000), 1);
  for (int stage = 1; stage <= 3; ++stage) {
    const int64_t world = smallest(stage, kBudget);
    ASSERT_GT(world, 1);
    const auto bytes_at = [&](int64_t size) {
      return estimate_state_bytes(7'500'000'000, static_cast<int>(size), DType::kBFloat16,
                                  {.sharding = sharding_of(stage), .accumulate_dtype = DType::kBFloat16})
          .total();
    };
    EXPECT_LE(bytes_at(world), kBudget);
    EXPECT_GT(bytes_at(world - 1), kBudget);
  }
  EXPECT_EQ(smallest(3, 1'875'000'000), 64);
  EXPECT_EQ(smallest(1, 30'000'000'000), 0) << "parameters and gradients alone are as much";
}

}  // namespace
}  // namespace tessera::zero
