// The bytes a rank holds: the table of docs/architecture.md, for Adam, in bytes a parameter.
#include "zero/memory_model.h"

#include <gtest/gtest.h>

namespace tessera::zero {
namespace {

constexpr int64_t kNumel = 16'384;  // divides by 4 ranks x 64 bytes: no padding
constexpr int kWorld = 4;

Layout layout_of(DType dtype, bool frozen_too = false) {
  std::vector<ParameterSpec> specs{{.name = "w", .shape = {kNumel}, .dtype = dtype, .trainable = true, .group = 0, .aliases = {}}};
  if (frozen_too) specs.push_back({.name = "frozen", .shape = {kNumel}, .dtype = dtype, .trainable = false, .group = 0, .aliases = {}});
  return Layout(specs, {.world_size = kWorld, .unit_numel = kNumel});
}

StateBytes per_parameter(const StateBytes& bytes) {
  return {bytes.parameters / kNumel, bytes.gradients / kNumel, bytes.master / kNumel, bytes.optimizer / kNumel};
}

StateBytes at_stage(int stage, DType dtype, DType accumulate = DType::kFloat32) {
  return per_parameter(model_state_bytes(layout_of(dtype), {.sharding = sharding_of(stage), .accumulate_dtype = accumulate, .num_states = 2}));
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
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(0)}), (StateBytes{8 * kNumel, 4 * kNumel, 0, 8 * kNumel}));
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(3)}).parameters, 8 * kNumel / kWorld);
}

TEST(MemoryModel, CountsPadding) {
  const Layout layout({{.name = "w", .shape = {1}, .dtype = DType::kFloat32, .trainable = true, .group = 0, .aliases = {}}}, {.world_size = 2});
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(0), .num_states = 0}), (StateBytes{128, 128, 0, 0}));
  EXPECT_EQ(model_state_bytes(layout, {.sharding = sharding_of(3), .num_states = 0}), (StateBytes{64, 64, 0, 0}));
}

}  // namespace
}  // namespace tessera::zero
