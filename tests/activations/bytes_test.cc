// The bytes that are held between forward and backward, counted by an allocator, against those of the
// formula.
#include <gtest/gtest.h>

#include "activations/checkpointing.h"
#include "comm/init/self.h"
#include "examples/language_model/model.h"
#include "tests/activations/models.h"
#include "tests/support/live_bytes.h"

namespace tessera::testing {
namespace {

constexpr int64_t kSmall = 4 * kLength * kDim * 4;  // a (4, 16, 64) tensor
constexpr int64_t kSlack = 4096;                    // means, deviations, the loss

template <class Holder>
auto make_engine(Holder model, const std::string& policy, std::optional<int64_t> num_blocks = {}) {
  Case c;
  c.micro_batch = 4;
  c.config.activations.policy = policy;
  c.config.activations.number_checkpoints = num_blocks;
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

TEST(ActivationBytes, EachBlockThatIsRecomputedFreesAsMuch) {
  const GptOptions shape{.vocabulary = 512};
  const at::Tensor tokens = randint(shape.vocabulary, {2, shape.sequence}, 1);
  const auto saved = [&](const std::string& policy, std::optional<int64_t> num_blocks = {}) {
    const LiveBytes live;
    const auto engine = make_engine(Gpt(shape), policy, num_blocks);
    const int64_t before = live.now();
    const at::Tensor loss = engine->forward(tokens, tokens);
    const int64_t held = live.now() - before;
    engine->backward(loss);
    return held;
  };
  const int64_t cheap = saved("cheap"), block = saved("block");
  for (int num_blocks = 0; num_blocks <= shape.layers; ++num_blocks) {
    const int64_t straight_line = cheap - (cheap - block) * num_blocks / shape.layers;
    EXPECT_NEAR(saved("block", num_blocks), straight_line, 0.02 * static_cast<double>(cheap)) << num_blocks;
  }
  EXPECT_EQ(saved("block", shape.layers + 1), block);
}

}  // namespace
}  // namespace tessera::testing
