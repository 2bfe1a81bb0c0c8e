// Every optimizer through the engine: against torch::optim (or its paper's formula), and the same at every
// stage and world; then the keys that change how gradients travel.
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

constexpr int kSteps = 20;

struct Algorithm {
  friend void PrintTo(const Algorithm& algorithm, std::ostream* out) { *out << algorithm.name; }
  std::string name;
  OptimizerOptions options;
  /// Trains a Bowl for kSteps in plain libtorch.
  std::function<void(BowlImpl&)> plain;
};

template <class Optimizer, class Options>
std::function<void(BowlImpl&)> with(Options options) {
  return [options](BowlImpl& model) {
    Optimizer optimizer(model.parameters(), options);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      model.forward().backward();
      optimizer.step();
    }
  };
}

/// `update(i, parameter, gradient, step)` for the i-th parameter; step counts from 1.
std::function<void(BowlImpl&)> by_hand(
    std::function<void(std::map<int, std::vector<at::Tensor>>&, int, at::Tensor&, const at::Tensor&, int)>
        update) {
  return [update](BowlImpl& model) {
    std::map<int, std::vector<at::Tensor>> states;
    std::vector<at::Tensor> parameters = model.parameters();
    for (int step = 1; step <= kSteps; ++step) {
      model.zero_grad();
      model.forward().backward();
      const at::NoGradGuard no_grad;
      for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
        std::vector<at::Tensor>& state = states[i];
        while (state.size() < 2) state.push_back(at::zeros_like(parameters[i]));
        update(states, i, parameters[i], parameters[i].grad(), step);
      }
    }
  };
}

/// Chen et al., arXiv:2302.06675, Algorithm 2.
const auto lion = by_hand([](auto& states, int i, at::Tensor& w, const at::Tensor& g, int) {
  at::Tensor& m = states[i][0];
  const at::Tensor direction = (m * 0.9 + g * 0.1).sign();
  m = m * 0.99 + g * 0.01;
  w.sub_((direction + w * 0.1) * 0.003);
});

/// You et al., arXiv:1904.00962, Algorithm 2, with DeepSpeed's bounds on the trust ratio.
const auto lamb = by_hand([](auto& states, int i, at::Tensor& w, const at::Tensor& g, int step) {
  at::Tensor& m = states[i][0];
  at::Tensor& v = states[i][1];
  m = m * 0.9 + g * 0.1;
  v = v * 0.999 + g * g * 0.001;
  const at::Tensor update =
      (m / (1 - std::pow(0.9, step))) / ((v / (1 - std::pow(0.999, step))).sqrt() + 1e-6) + w * 0.01;
  const double ratio =
      std::clamp(w.norm().template item<double>() / update.norm().template item<double>(), 0.01, 10.0);
  w.sub_(update * (0.01 * ratio));
});

std::vector<Algorithm> algorithms() {
  namespace optim = torch::optim;
  return {
      {"AdamL2", AdamOptions{.lr = 0.01, .weight_decay = 0.1},
       with<optim::Adam>(optim::AdamOptions(0.01).weight_decay(0.1))},
      {"AdamW", AdamWOptions{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.98, .eps = 1e-6, .weight_decay = 0.1},
       with<optim::AdamW>(optim::AdamWOptions(0.01).betas({0.8, 0.98}).eps(1e-6).weight_decay(0.1))},
      {"SGD", SGDOptions{.lr = 0.02}, with<optim::SGD>(optim::SGDOptions(0.02))},
      {"SGDWeightDecay", SGDOptions{.lr = 0.02, .weight_decay = 0.1},
       with<optim::SGD>(optim::SGDOptions(0.02).weight_decay(0.1))},
      {"SGDDampening", SGDOptions{.lr = 0.02, .momentum = 0.8, .dampening = 0.3},
       with<optim::SGD>(optim::SGDOptions(0.02).momentum(0.8).dampening(0.3))},
      {"SGDNesterov", SGDOptions{.lr = 0.01, .weight_decay = 0.05, .momentum = 0.8, .nesterov = true},
       with<optim::SGD>(optim::SGDOptions(0.01).momentum(0.8).nesterov(true).weight_decay(0.05))},
      {"Adagrad", AdagradOptions{.lr = 0.1, .eps = 1e-10, .weight_decay = 0.1, .lr_decay = 0.05},
       with<optim::Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.05).weight_decay(0.1).eps(1e-10))},
      {"Amsgrad", AdamWOptions{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true},
       with<optim::AdamW>(optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true))},
      {"RMSprop", RMSpropOptions{.lr = 0.01, .alpha = 0.9, .weight_decay = 0.1},
       with<optim::RMSprop>(optim::RMSpropOptions(0.01).alpha(0.9).weight_decay(0.1))},
      {"RMSpropMomentum", RMSpropOptions{.lr = 0.005, .momentum = 0.8},
       with<optim::RMSprop>(optim::RMSpropOptions(0.005).momentum(0.8))},
      {"RMSpropCentered", RMSpropOptions{.lr = 0.005, .eps = 1e-3, .momentum = 0.5, .centered = true},
       with<optim::RMSprop>(optim::RMSpropOptions(0.005).eps(1e-3).momentum(0.5).centered(true))},
      {"Lion", LionOptions{.lr = 0.003, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}, lion},
      {"LAMB", LambOptions{.lr = 0.01, .eps = 1e-6, .weight_decay = 0.01}, lamb},
  };
}

Tensors engine_weights(const Algorithm& algorithm, int world, int stage,
                       const std::function<void(EngineConfig&)>& change = {}) {
  Tensors weights;
  on_ranks(world, [&](comm::CommunicatorPtr comm) {
    EngineConfig config;
    config.train_micro_batch_size_per_gpu = 1;
    config.zero.stage = stage;
    config.zero.unit_numel = 200;  // two units hold two parameters, and shards cut through all
    config.zero.param_persistence_threshold = 0;
    config.optimizer.options = algorithm.options;
    if (change) change(config);
    Bowl model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, config, comm);
    for (int step = 0; step < kSteps; ++step) {
      for (int64_t micro = 0; micro < engine->config().gradient_accumulation_steps; ++micro) {
        engine->backward(engine->forward());
        engine->step();
      }
    }
    Tensors mine = full_parameters(*engine);
    if (comm->rank() == 0) weights = std::move(mine);
  });
  return weights;
}

class Optimizer : public ::testing::TestWithParam<Algorithm> {};

TEST_P(Optimizer, EqualsThePlainOneAndItselfEverywhere) {
  Bowl model;
  fill_parameters(*model, 1);
  Tensors before, plain;
  for (const auto& item : model->named_parameters()) before[item.key()] = item.value().detach().clone();
  GetParam().plain(*model);
  for (const auto& item : model->named_parameters()) plain[item.key()] = item.value().detach();
  ASSERT_GT(largest_difference(before, plain), 0.03) << "it must have moved";
  const Tensors one = engine_weights(GetParam(), 1, 0);
  EXPECT_LT(largest_difference(one, plain), 1e-6);
  for (int world = 1; world <= 3; ++world)
    for (int stage = 0; stage <= 3; ++stage) {
      const Tensors weights = engine_weights(GetParam(), world, stage);
      EXPECT_LT(largest_difference(weights, one), 1e-6) << "world " << world << " stage " << stage;
      if (world == 1) {
        EXPECT_TRUE(bit_equal(weights, one)) << "stage " << stage;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(All, Optimizer, ::testing::ValuesIn(algorithms()),
                         [](const auto& info) { return info.param.name; });

// ------------------------------------------------------------------------- how gradients travel

class Transport : public ::testing::TestWithParam<int> {  // stage
 protected:
  Tensors run(const std::function<void(EngineConfig&)>& change = {}) const {
    return engine_weights({.name = "", .options = SGDOptions{.lr = 0.02, .momentum = 0.9}, .plain = {}}, 2,
                          GetParam(), change);
  }
};

TEST_P(Transport, WithoutOverlapTheBitsAreTheSame) {
  EXPECT_TRUE(bit_equal(run([](EngineConfig& config) { config.zero.overlap_comm = false; }), run()));
}

TEST_P(Transport, WithOneBufferTheBitsAreTheSame) {
  EXPECT_TRUE(bit_equal(run([](EngineConfig& config) { config.zero.communication_buffers = 1; }), run()));
}

TEST_P(Transport, OtherUnitsGiveTheSameBits) {
  EXPECT_TRUE(bit_equal(run([](EngineConfig& config) { config.zero.unit_numel = 1'000'000; }), run()));
  EXPECT_TRUE(bit_equal(run([](EngineConfig& config) { config.zero.reduce_bucket_size = 100; }), run()));
}

TEST_P(Transport, PrescalingAndPredividingOnlyMoveTheDivision) {
  const Tensors expected = run();
  EXPECT_TRUE(bit_equal(run([](EngineConfig& config) { config.prescale_gradients = true; }), expected));
  EXPECT_TRUE(bit_equal(run([](EngineConfig& config) { config.gradient_predivide_factor = 2; }), expected));
  EXPECT_LT(
      largest_difference(run([](EngineConfig& config) { config.gradient_predivide_factor = 3; }), expected),
      1e-5);
}

TEST_P(Transport, ReducingEachMicroStepGivesTheSameMean) {
  const auto accumulate = [](bool each) {
    return [each](EngineConfig& config) {
      config.gradient_accumulation_steps = 3;
      config.zero.reduce_each_micro_step = each;
    };
  };
  EXPECT_LT(largest_difference(run(accumulate(true)), run()), 1e-5);
  EXPECT_LT(largest_difference(run(accumulate(false)), run()), 1e-5);
}

TEST_P(Transport, InBf16OnlyTheDigitsOnTheWireAreFewer) {
  const Tensors expected = run();
  const auto bf16 = [](EngineConfig& config) { config.communication_dtype = DType::kBFloat16; };
  const Tensors found = run(bf16);
  EXPECT_FALSE(bit_equal(found, expected)) << "the key must have an effect";
  EXPECT_LT(largest_difference(found, expected), 0.02);
  EXPECT_TRUE(bit_equal(
      found, engine_weights({.name = "", .options = SGDOptions{.lr = 0.02, .momentum = 0.9}, .plain = {}}, 2,
                            0, bf16)))
      << "at every stage alike";
}

INSTANTIATE_TEST_SUITE_P(Stages, Transport, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

}  // namespace
}  // namespace tessera::testing
