// Optimizers by the number of states that they keep, through the engine: against torch::optim (or the paper's
// formula), and the same at every stage and world; then the keys that change how gradients travel. Each
// formula: tests/zero/kernels/optimizers_test.cc; options and groups: client_optimizer_test.cc.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "core/str.h"
#include "examples/project/rmsprop.h"
#include "tests/engine/optimizer/bowls.h"
#include "tests/zero/kernels/papers.h"

namespace tessera::testing {
namespace {

struct Algorithm {
  friend void PrintTo(const Algorithm& algorithm, std::ostream* out) { *out << algorithm.name; }
  std::string name;
  OptimizerOptions options;
  std::function<Tensors()> plain;
  std::shared_ptr<zero::UpdateRule> rule = nullptr;
  double limit = 1e-6, at_least = 0, between_worlds = 1e-6;  // apart from the plain one
};

template <class Optimizer, class Options>
std::function<Tensors()> by(const Options& options) {
  return [options] {
    return plain_bowl(
        [&](BowlImpl& model) { return std::make_unique<Optimizer>(model.parameters(), options); });
  };
}

/// `update(w, m, v, gradient, number)`, which counts from 1.
template <class Update>
std::function<Tensors()> by_hand(const Update& update) {
  return [update] {
    Bowl model;
    fill_parameters(*model, 1);
    std::map<std::string, std::pair<at::Tensor, at::Tensor>> states;
    return plain_bowl(*model, 20, [&](int number) {
      for (const auto& item : model->named_parameters()) {
        auto& [m, v] = states[item.key()];
        if (number == 0) m = at::zeros_like(item.value()), v = m.clone();
        at::Tensor w = item.value().detach();
        update(w, m, v, item.value().grad(), number + 1);
        item.value().set_data(w);
      }
    });
  };
}

std::vector<Algorithm> algorithms() {
  namespace optim = torch::optim;
  const kernels::Hyper lion{.lr = 0.003, .beta2 = 0.99, .weight_decay = 0.1},
      lamb{.lr = 0.05, .eps = 1e-6, .weight_decay = 0.01, .bias_correction = false, .max_coeff = 0.03};
  return {
      {"NoState", SGDOptions{.lr = 0.02, .weight_decay = 0.1},
       by<optim::SGD>(optim::SGDOptions(0.02).weight_decay(0.1))},
      {"OneStateOfLion", LionOptions{.lr = 0.003, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1},
       by_hand([lion](at::Tensor& w, at::Tensor& m, at::Tensor&, const at::Tensor& g, int) {
         lion_of_the_paper(lion, w, m, g);
       })},
      {"TwoStatesAndNormsOfLamb",
       LambOptions{
           .lr = 0.05, .eps = 1e-6, .weight_decay = 0.01, .bias_correction = false, .max_coeff = 0.03},
       by_hand([lamb](at::Tensor& w, at::Tensor& m, at::Tensor& v, const at::Tensor& g, int number) {
         lamb_of_the_paper(lamb, number, w, m, v, g);
       })},
      {"ThreeStatesOfRMSprop", RMSpropOptions{.lr = 0.005, .eps = 1e-3, .momentum = 0.5, .centered = true},
       by<optim::RMSprop>(optim::RMSpropOptions(0.005).eps(1e-3).momentum(0.5).centered(true))},
      // A formula from outside, which reads lr and weight_decay alone.
      {"AnUpdateRule", AdamWOptions{.lr = 0.01, .weight_decay = 0.1},
       by<optim::RMSprop>(optim::RMSpropOptions(0.01).weight_decay(0.1)), std::make_shared<RMSprop>()},
      {.name = "EightBitsOnOwners",
       .options = AdamW8bitOptions{.lr = 0.01, .weight_decay = 0.1, .min_8bit_size = 20},
       .plain = by<optim::AdamW>(optim::AdamWOptions(0.01).weight_decay(0.1)),
       .limit = 0.04,  // of steps that add up to 0.2
       .at_least = 1e-4,
       .between_worlds = 0.01},
  };
}

class Optimizer : public ::testing::TestWithParam<Algorithm> {};

TEST_P(Optimizer, EqualsThePlainOneAndItselfEverywhere) {
  const auto train = [](int world, int stage) {
    return bowl_weights(world, bowl_config(stage, GetParam().options), {.update_rule = GetParam().rule});
  };
  const Tensors one = train(1, 0), plain = GetParam().plain();
  ASSERT_GT(largest_difference(bowl_weights(1, bowl_config(0), {}, 0), plain), 0.03) << "it must have moved";
  EXPECT_LT(largest_difference(one, plain), GetParam().limit);
  EXPECT_GE(largest_difference(one, plain), GetParam().at_least);
  for (const int world : {2, 3}) {
    Tensors first;
    for (int stage = 0; stage <= 3; ++stage) {
      const Tensors weights = train(world, stage);
      EXPECT_LT(largest_difference(weights, one), GetParam().between_worlds)
          << "world " << world << " stage " << stage;
      // Sums of more than two gradients have one order in shared memory and, from stage 1 on, over Gloo.
      if (stage == 0 || (stage == 1 && world > 2 && !in_shared_memory())) first = weights;
      EXPECT_TRUE(bit_equal(weights, first)) << "world " << world << " stage " << stage;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Optimizer, ::testing::ValuesIn(algorithms()),
                         [](const auto& info) { return info.param.name; });

// ------------------------------------------------------------------------- how gradients travel

Tensors with_sgd(int stage, const std::function<void(EngineConfig&)>& change = {}) {
  EngineConfig config = bowl_config(stage, SGDOptions{.lr = 0.02, .momentum = 0.9});
  if (change) change(config);
  return bowl_weights(2, config);
}

class Transport : public ::testing::TestWithParam<int> {};  // stage

TEST_P(Transport, KeysThatMoveSumsAndDivisionsChangeTheRoundingAtMost) {
  struct Key {
    const char* name;
    double limit;  // 0: the bits are the same
    std::function<void(EngineConfig&)> set;
  };
  const auto accumulate = [](EngineConfig& config, bool each) {
    config.gradient_accumulation_steps = 3;
    config.zero.reduce_each_micro_step = each;
  };
  const Tensors expected = with_sgd(GetParam());
  for (const Key& key : std::vector<Key>{
           {"overlap_comm", 0, [](EngineConfig& config) { config.zero.overlap_comm = false; }},
           {"communication_buffers", 0, [](EngineConfig& config) { config.zero.communication_buffers = 1; }},
           {"unit_numel", 0, [](EngineConfig& config) { config.zero.unit_numel = 1'000'000; }},
           {"reduce_bucket_size", 0, [](EngineConfig& config) { config.zero.reduce_bucket_size = 100; }},
           {"prescale_gradients", 0, [](EngineConfig& config) { config.prescale_gradients = true; }},
           {"predivide by 2", 0, [](EngineConfig& config) { config.gradient_predivide_factor = 2; }},
           {"predivide by 3", 1e-5, [](EngineConfig& config) { config.gradient_predivide_factor = 3; }},
           {"reduce_each_micro_step", 1e-5, [&](EngineConfig& config) { accumulate(config, true); }},
           {"accumulation", 1e-5, [&](EngineConfig& config) { accumulate(config, false); }}}) {
    const double apart = largest_difference(with_sgd(GetParam(), key.set), expected);
    EXPECT_TRUE(key.limit == 0 ? apart == 0 : apart < key.limit) << key.name << ": apart by " << apart;
  }
}

TEST_P(Transport, InBf16OnlyTheDigitsOnTheWireAreFewer) {
  const auto bf16 = [](EngineConfig& config) { config.communication_dtype = DType::kBFloat16; };
  const Tensors expected = with_sgd(GetParam()), found = with_sgd(GetParam(), bf16);
  EXPECT_FALSE(bit_equal(found, expected)) << "the key must have an effect";
  EXPECT_LT(largest_difference(found, expected), 0.02);
  EXPECT_TRUE(bit_equal(found, with_sgd(0, bf16))) << "at every stage alike";
}

INSTANTIATE_TEST_SUITE_P(Stages, Transport, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

}  // namespace
}  // namespace tessera::testing
