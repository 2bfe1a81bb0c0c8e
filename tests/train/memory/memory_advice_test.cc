// What would make room: against the table of docs/architecture.md, by hand.
#include "train/memory/memory_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/str.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kMega = 1'000'000;
constexpr int kWorld = 4;

/// Ten units of a million fp32 parameters (1,024,000, which divide by all worlds below without padding) on
/// four ranks. With Adam 16 bytes a parameter, of which 4 are the parameter and 4 its gradient.
class Advice : public ::testing::Test {
 protected:
  static constexpr int64_t kNumel = 1'024'000, kUnits = 10;

  std::vector<std::string> of(int64_t missing_mb) {
    shortage_.wanted = 1'000 * kMega;
    shortage_.available = shortage_.wanted - missing_mb * kMega;
    return of();
  }
  std::vector<std::string> of() {
    std::vector<zero::ParameterSpec> specs;
    for (int i = 0; i < kUnits; ++i)
      specs.push_back({.name = str("w", i, ".weight"),
                       .shape = {kNumel},
                       .dtype = DType::kFloat32,
                       .trainable = true,
                       .group = 0,
                       .aliases = {}});
    const zero::Layout layout(specs, {.world_size = world_, .unit_numel = kNumel});
    model_.sharding = zero::sharding_of(config_.zero.stage);
    return memory_advice(shortage_, config_, layout, model_);
  }

  int world_ = kWorld;
  Shortage shortage_;
  EngineConfig config_;
  zero::StateModel model_{.sharding = {}, .ranks_a_host = 1, .tiers = {.device_memory_is_separate = true}};
};

// In MB, from 163.84 of all: stage 1 has 81.92 + 81.92/4 = 102.4; stage 2 40.96 + 122.88/4 = 71.68 and three
// slots of 4.096 that gradients are reduced from; stage 3 163.84/4 = 40.96, these, and three buffers
// of 4.096.
TEST_F(Advice, TheLowestStageThatIsEnough) {
  EXPECT_THAT(of(61),
              ElementsAre("zero_optimization.stage 1 (model state of a rank 102.4 MB, now 163.8 MB)"));
  EXPECT_THAT(of(62), ElementsAre("zero_optimization.stage 2 (model state of a rank 84.0 MB, now 163.8 MB)"));
  EXPECT_THAT(of(80), ElementsAre("zero_optimization.stage 3 (model state of a rank 65.5 MB, now 163.8 MB)"));
}

// 163.84 / ranks + 24.576 <= 163.84 - 106 holds from 5 ranks on.
TEST_F(Advice, TheFewestRanksWhereNoStageIsEnough) {
  EXPECT_THAT(of(106), ElementsAre("5 ranks at stage 3 (model state of a rank 57.3 MB, now 163.8 MB)"));
  config_.zero.stage = 3;
  EXPECT_THAT(of(1), ElementsAre("5 ranks (model state of a rank 57.3 MB, now 65.5 MB)",
                                 "zero_optimization.offload_optimizer.device \"cpu\" (model state of a rank "
                                 "34.8 MB, now 65.5 MB)"));
  EXPECT_THAT(of(42), IsEmpty()) << "three gathered units and three slots are more";
  config_.zero.stage = 0;
  EXPECT_THAT(of(160), IsEmpty());
  EXPECT_THAT(of(170), IsEmpty()) << "more than there is";
}

TEST_F(Advice, OneRankHasNoStages) {
  world_ = 1;
  EXPECT_THAT(of(100), ElementsAre("5 ranks at stage 3 (model state of a rank 57.3 MB, now 163.8 MB)",
                                   "zero_optimization.offload_optimizer.device and offload_param.device "
                                   "\"cpu\" at stage 3 (model state of a rank 24.6 MB, now 163.8 MB)"))
      << "offloading the optimizer alone leaves parameters and gradients: 81.9 MB";
  EXPECT_THAT(of(80), ElementsAre("3 ranks at stage 3 (model state of a rank 79.2 MB, now 163.8 MB)",
                                  "zero_optimization.offload_optimizer.device \"cpu\" (model state of a "
                                  "rank 81.9 MB, now 163.8 MB)"));
}

// On the CPU state below memory is on disk, and passes through buffers of a part's size: 2 x 4.
TEST_F(Advice, OffloadingOnTheCpuIsToDisk) {
  model_.tiers.device_memory_is_separate = false;
  config_.zero.stage =
      2;  // 71.68 and slots; optimizer state 20.48 and gradients 10.24 of it; buffers 8 x 1.024
  EXPECT_THAT(of(20),
              ElementsAre("5 ranks at stage 3 (model state of a rank 57.3 MB, now 84.0 MB)",
                          "zero_optimization.offload_optimizer.device \"nvme\" (model state of a rank "
                          "61.4 MB, now 84.0 MB)"))
      << "stage 3 has 65.5 MB";
}

TEST_F(Advice, TheBatchInProportionToActivations) {
  shortage_ = {.wanted = 50 * kMega,
               .available = 20 * kMega,
               .activations = 100 * kMega,
               .for_activations = true,
               .batch_key = "train_micro_batch_size_per_gpu",
               .batch = 8,
               .trains = true};
  config_.gradient_accumulation_steps = 2;
  const std::vector<std::string> advice = of();
  ASSERT_EQ(advice.size(), 3u);
  EXPECT_EQ(advice[0], "zero_optimization.stage 1 (model state of a rank 102.4 MB, now 163.8 MB)");
  EXPECT_EQ(advice[1],
            "train_micro_batch_size_per_gpu of at most about 6 (now 8) with more gradient_accumulation_steps "
            "(now 2)")
      << "8 x 120 / 150";
  EXPECT_EQ(advice[2], "activation_checkpointing.policy \"block\" (activations were 100.0 MB)");

  shortage_.available = 50 * kMega - 1;
  EXPECT_EQ(of()[1].find("train_micro_batch_size_per_gpu of at most about 7 "), 0u) << "less than it is";
  shortage_.batch = 1;
  EXPECT_EQ(of().size(), 2u) << "no batch is smaller than 1";

  // What is gathered does not become smaller with the batch: 8 x (100 - 90) / 100 is none.
  shortage_ = {.wanted = 95 * kMega,
               .available = 5 * kMega,
               .activations = 100 * kMega,
               .for_activations = false,
               .batch_key = "trainer.eval_batch_size",
               .batch = 8};
  EXPECT_EQ(of().size(), 1u);
  shortage_.batch = 20;
  EXPECT_EQ(of()[1], "trainer.eval_batch_size of at most about 2 (now 20)");
  shortage_.activations.reset();
  EXPECT_EQ(of().size(), 1u) << "nothing is known of activations";
  shortage_.for_activations = true;
  EXPECT_EQ(of().size(), 1u) << "of what was wanted is not known what part it is";
}

// A tensor that is larger than what was free and all activations together fits with neither.
TEST_F(Advice, NothingWhereNothingIsEnough) {
  shortage_ = {.wanted = int64_t{1} << 50,
               .available = 0,
               .activations = 100 * kMega,
               .for_activations = true,
               .batch_key = "train_micro_batch_size_per_gpu",
               .batch = 8,
               .trains = true};
  EXPECT_THAT(of(), IsEmpty());
}

}  // namespace
}  // namespace tessera::train
