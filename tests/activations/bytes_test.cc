// The bytes that are held between forward and backward, counted by an allocator, against those of the
// formula.
#include <gtest/gtest.h>

#include "activations/checkpointing.h"
#include "benchmarks/gpt.h"
#include "comm/init/self.h"
#include "tests/activations/models.h"
#include "tests/support/live_bytes.h"

namespace tessera::testing {
namespace {

constexpr int64_t kSmall = 4 * kLength * kDim * 4;  // a (4, 16, 64) tensor
constexpr int64_t kSlack = 4096;                    // means, deviations, the loss

template <class Holder>
auto make_engine(Holder model, const std::string& policy, int64_t budget = 0) {
  Case c;
  c.micro_batch = 4;
  c.config.activations.policy = policy;
  c.config.activations.budget_bytes = budget;
  return initialize(model, engine_config(c),
                    std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
}

/// Of a forward: bytes more when it has ended than when it began.
int64_t held_bytes(const std::string& policy, activations::Counts* counts = nullptr) {
  const LiveBytes live;
  const auto engine = make_engine(DropoutMlp(), policy);
  const at::Tensor x = randn({4, kLength, kDim}, 1), target = randn({4, kLength, kDim}, 2);
  engine->backward(engine->forward(x, target));  // libtorch makes some buffers once
  engine->step();
  const int64_t before = live.now();
  const at::Tensor loss = engine->forward(x, target);
  const int64_t held = live.now() - before;
  engine->backward(loss);
  if (counts != nullptr) *counts = engine->activations()->counts();
  return held;
}

// A block saves: its input and the layer norm's result (1 each), the input of gelu, the mask of dropout and
// its result (4 each). The first block's input and the target were there before. at::mse_loss() saves the
// last block's result, and its own result lies in memory as large (whatever is recomputed).
TEST(ActivationBytes, NoneKeepsAll) { EXPECT_NEAR(held_bytes("none"), (3 * 14 - 1 + 2) * kSmall, kSlack); }

TEST(ActivationBytes, CheapKeepsWhatMatrixProductsMade) {
  activations::Counts counts;
  EXPECT_NEAR(held_bytes("cheap", &counts), (3 * 5 - 1 + 2) * kSmall, kSlack);
  EXPECT_EQ(counts.dropped_bytes, 3 * 9 * kSmall);
  EXPECT_NEAR(counts.kept_bytes, (3 * 5 + 2) * kSmall, kSlack);
}

// The loss belongs to the last block: no parameter of another module is read before it.
TEST(ActivationBytes, BlockKeepsInputs) {
  activations::Counts counts;
  EXPECT_NEAR(held_bytes("block", &counts), (3 - 1 + 1) * kSmall, kSlack);
  EXPECT_EQ(counts.dropped_bytes, (3 * 13 + 1) * kSmall);
}

TEST(ActivationBytes, BackwardFreesWhatItMakes) {
  const LiveBytes live;
  const auto engine = make_engine(DropoutMlp(), "block");
  const at::Tensor x = randn({4, kLength, kDim}, 1), target = randn({4, kLength, kDim}, 2);
  const auto step = [&] {
    engine->backward(engine->forward(x, target));
    engine->step();
  };
  step();
  const int64_t between_steps = live.now();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(live.now(), between_steps);
}

TEST(ActivationBytes, BudgetIsKeptWithinFivePercent) {
  using benchmarks::small_gpt;
  GptOptions shape = small_gpt();
  shape.vocabulary = 512;
  const at::Tensor tokens = randint(shape.vocabulary, {2, shape.sequence}, 1);
  const auto saved = [&](const std::string& policy, int64_t budget) {
    const LiveBytes live;
    const auto engine = make_engine(Gpt(shape), policy, budget);
    int64_t held = 0;
    for (int step = 0; step < 2; ++step) {  // the first one is the profile
      const int64_t before = live.now();
      const at::Tensor loss = engine->forward(tokens, tokens);
      held = live.now() - before;
      engine->backward(loss);
      engine->step();
    }
    return held;
  };
  const int64_t all = saved("none", 0);
  for (const int percent : {80, 40}) {
    const int64_t budget = all * percent / 100;
    const int64_t held = saved("budget", budget);
    EXPECT_LE(held, budget * 1.05) << percent;
    EXPECT_GE(held, budget * 0.95) << percent;
  }
}

// What the ZeRO stage gathers, and when, is no part of the plan.
TEST(ActivationBytes, BudgetIsKeptAtEveryStageWithDropout) {
  const int64_t saved = (3 * 14 + 1) * kSmall, budget = saved / 2;
  for (const int stage : {0, 1, 2, 3}) {
    Case c;
    c.micro_batch = 4;
    c.config.zero.stage = stage;
    c.config.zero.unit_numel = 10'000;
    c.config.zero.param_persistence_threshold = 0;
    c.config.activations.policy = "budget";
    c.config.activations.budget_bytes = budget;
    const auto engine = initialize(DropoutMlp(), engine_config(c),
                                   std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
    const at::Tensor x = randn({4, kLength, kDim}, 1), target = randn({4, kLength, kDim}, 2);
    for (int step = 0; step < 5; ++step) {
      engine->backward(engine->forward(x, target));
      engine->step();
      const activations::Counts counts = engine->activations()->counts();
      EXPECT_EQ(counts.left_plan, "") << "stage " << stage << ", step " << step;
      if (step == 0) continue;  // the profile
      EXPECT_LE(counts.kept_bytes, budget * 1.05) << "stage " << stage << ", step " << step;
      EXPECT_GE(counts.kept_bytes, budget - 4 * kSmall) << "the largest saved tensor; stage " << stage;
    }
  }
}

}  // namespace
}  // namespace tessera::testing
