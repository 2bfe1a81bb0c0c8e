// The bytes of model state of a rank: by formula, by the tensors' sizes, and counted by the allocator.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include "core/str.h"
#include "tests/support/backend.h"
#include "tests/support/live_bytes.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

enum class Precision { kFp32, kBf16, kFp16, kBf16Accumulating };

EngineConfig with_precision(EngineConfig config, Precision precision) {
  config.bf16 = precision == Precision::kBf16 || precision == Precision::kBf16Accumulating;
  config.fp16.enabled = precision == Precision::kFp16;
  if (precision == Precision::kBf16Accumulating) config.grad_accum_dtype = DType::kBFloat16;
  return config;
}

// Weights and moments in fp32, and frozen weights as they are: this rank's shards, at every stage alike.
TEST(StateBytes, AsynchronousCheckpointsSetMemoryAside) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      Case c = small_units(2, stage);
      c.optimizer = "AdamW";
      c.config.bf16 = true;
      c.config.checkpoint.async = true;
      Odds model;
      auto engine = initialize(model, engine_config(c), comm);
      int64_t expected = 0;
      for (const zero::UnitSpec& unit : engine->sharded_model().layout().units())
        expected += unit.numel / 2 * (unit.trainable ? 12 : 2);
      EXPECT_EQ(engine->measured_bytes().snapshot, expected);
      EXPECT_EQ(engine->formula_bytes(), engine->measured_bytes());
      EXPECT_EQ(engine->measured_bytes().total() - engine->sharded_model().measured_bytes().total(),
                expected);
    });
  }
}

// The formula's numbers: zero/plan/memory_model_test.cc and train/memory/state_formulas_test.cc.
TEST(StateBytes, AreTheFormulasAtEveryStagePrecisionAndOptimizer) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    for (int stage = 0; stage <= 3; ++stage)
      for (const Precision precision :
           {Precision::kFp32, Precision::kBf16, Precision::kFp16, Precision::kBf16Accumulating})
        for (const std::string optimizer : {"AdamW", "SGD", "AMSGrad"}) {
          SCOPED_TRACE(str("stage ", stage, " precision ", static_cast<int>(precision), " ", optimizer));
          Case c = small_units(2, stage);
          c.optimizer = optimizer;
          c.config = with_precision(c.config, precision);
          Odds model;
          auto engine = initialize(model, engine_config(c), comm);
          engine->backward(odds_loss(*model, 0, 0, 2));
          engine->step();
          EXPECT_GT(engine->measured_bytes().optimizer, 0);
          EXPECT_EQ(engine->measured_bytes(), engine->formula_bytes());
        }
  });
}

/// Twelve layers of 64 x 64, about 50,000 parameters: big beside everything else the process holds.
torch::nn::Sequential stack() {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 12; ++layer) model->push_back(torch::nn::Linear(64, 64));
  return model;
}

constexpr int64_t kLayerNumel = 64 * 64 + 64;
constexpr int64_t kSmallThings = 24 << 10;  // activations of 2 samples, loss, norms, counters

/// One rank's memory after a few steps, and its peak during the last one.
void check_allocations(comm::CommunicatorPtr comm, int stage, Precision precision) {
  LiveBytes live;
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 2;
  config.optimizer.options = AdamWOptions{.lr = 0.001};
  config.zero.stage = stage;
  config.zero.unit_numel = kLayerNumel;
  config.zero.param_persistence_threshold = 0;
  config = with_precision(config, precision);
  torch::nn::Sequential model = stack();
  auto engine = initialize(model, config, comm);
  for (int step = 0; step < 4; ++step) {
    if (step == 3) live.reset_peak();
    engine->backward(engine->forward(randn({2, 64}, step)).square().mean());
    engine->step();
  }
  zero::ShardedModel& sharded = engine->sharded_model();
  const int64_t state = sharded.measured_bytes().total();
  const int64_t pool = sharded.residency().pool().peak_bytes();
  const int64_t slots = sharded.gradients().slot_bytes();
  const int64_t unit_bytes = sharded.layout().units()[0].numel * 4;
  ASSERT_EQ(sharded.layout().num_units(), 12);
  const int buffers = engine->config().zero.communication_buffers;
  EXPECT_LE(pool, stage == 3 ? buffers * unit_bytes : 0);
  EXPECT_LE(slots, buffers * unit_bytes);
  EXPECT_GE(live.now(), state) << "every byte of state comes from the allocator";
  EXPECT_LE(live.now(), state + pool + slots + kSmallThings);
  // During the step: one layer's gradient on its way (twice, while it is transposed), however slow
  // the other ranks are. And over Gloo, what the ranks send each other for a few reductions: for as
  // many as there are slots, or would be.
  const int64_t received = comm->buffers_reductions() && stage > 0 ? buffers * unit_bytes : 0;
  EXPECT_LE(live.peak(), state + pool + slots + received + 3 * unit_bytes + kSmallThings);
}

class Allocations : public ::testing::TestWithParam<int> {};  // world

TEST_P(Allocations, NothingElseOfTheModelsSizeIsAlive) {
  TESSERA_ON_ONE_BACKEND();
  on_ranks(
      GetParam(),
      [](comm::CommunicatorPtr comm) {
        for (int stage = 0; stage <= 3; ++stage)
          for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
            SCOPED_TRACE(
                str("stage ", stage, " precision ", static_cast<int>(precision), " rank ", comm->rank()));
            check_allocations(comm, stage, precision);
          }
      },
      "gloo");  // what lies in shared memory does not come from the allocator
}

INSTANTIATE_TEST_SUITE_P(Worlds, Allocations, ::testing::Values(1, 3),
                         [](const auto& info) { return str("World", info.param); });

}  // namespace
}  // namespace tessera::testing
