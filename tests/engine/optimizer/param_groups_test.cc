// Param groups by name pattern, from JSON and from C++, against torch::optim's;
// learning rates with a schedule.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "core/str.h"
#include "engine/optimizer/optimizer_setup.h"
#include "tests/support/log_file.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

EngineConfig bowl_config(int stage) {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.zero.stage = stage;
  config.zero.unit_numel = 200;
  config.zero.param_persistence_threshold = 0;
  config.optimizer.options = AdamWOptions{.lr = 0.02, .weight_decay = 0.3};
  return config;
}

Tensors train_bowl(const EngineConfig& config, int world, const InitOptions& options = {}, int steps = 20) {
  Tensors weights;
  on_ranks(world, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, config, comm, options);
    for (int step = 0; step < steps; ++step) {
      engine->backward(engine->forward());
      engine->step();
    }
    Tensors mine = full_parameters(*engine);
    if (comm->rank() == 0) weights = std::move(mine);
  });
  return weights;
}

/// torch::optim::AdamW: no decay for `bias` and `norm*`, another lr and other betas for `matrix`.
Tensors torch_groups() {
  Bowl model;
  fill_parameters(*model, 1);
  const auto options = [] { return torch::optim::AdamWOptions(0.02).weight_decay(0.3); };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{model->weight},
                      std::make_unique<torch::optim::AdamWOptions>(options()));
  groups.emplace_back(std::vector<at::Tensor>{model->bias, model->norm_weight},
                      std::make_unique<torch::optim::AdamWOptions>(options().weight_decay(0)));
  groups.emplace_back(std::vector<at::Tensor>{model->matrix},
                      std::make_unique<torch::optim::AdamWOptions>(options().lr(0.05).betas({0.8, 0.95})));
  torch::optim::AdamW optimizer(groups, options());
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    model->forward().backward();
    optimizer.step();
  }
  Tensors weights;
  for (const auto& item : model->named_parameters()) weights[item.key()] = item.value().detach();
  return weights;
}

const ParamGroupConfig kNoDecay{.match = {"bias", "norm*"}, .params = {{"weight_decay", 0.0}}};
const ParamGroupConfig kMatrix{.match = {"m?trix"},
                               .params = {{"lr", 0.05}, {"beta1", 0.8}, {"beta2", 0.95}}};

TEST(ParamGroups, FromCppEqualTorchOptimsAtEveryStageAndWorld) {
  const Tensors expected = torch_groups();
  ASSERT_GT(largest_difference(train_bowl(bowl_config(0), 1), expected), 1e-3) << "the groups must matter";
  const Tensors one = train_bowl(bowl_config(0), 1, {.param_groups = {kNoDecay, kMatrix}});
  EXPECT_LT(largest_difference(one, expected), 2e-6);
  for (int world = 1; world <= 3; ++world)
    for (int stage = 0; stage <= 3; ++stage)
      EXPECT_LT(largest_difference(
                    train_bowl(bowl_config(stage), world, {.param_groups = {kNoDecay, kMatrix}}), one),
                1e-6)
          << "world " << world << " stage " << stage;
}

TEST(ParamGroups, FromJsonEqualThoseFromCpp) {
  const EngineConfig config = parse_engine_config(R"({
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "unit_numel": 200},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.3}, "param_groups": [
      {"match": ["bias", "norm*"], "weight_decay": 0},
      {"match": "m?trix", "lr": 0.05, "betas": [0.8, 0.95]}
    ]}
  })",
                                                  {.world_size = 2});
  const Tensors from_json = train_bowl(config, 2);
  EXPECT_TRUE(bit_equal(from_json, train_bowl(bowl_config(2), 2, {.param_groups = {kNoDecay, kMatrix}})));
}

TEST(ParamGroups, OfJsonMayHaveNamesInPlaceOfPatterns) {
  const auto config = [](const char* group) {
    return parse_engine_config(str(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
      "optimizer": {"type": "SGD", "params": {"lr": 0.01}, "param_groups": [{)",
                                   group, R"(, "lr": 0.05}]}})"),
                               {.world_size = 1});
  };
  const Tensors by_pattern = train_bowl(config(R"("match": ["matrix", "bias"])"), 1);
  EXPECT_TRUE(bit_equal(train_bowl(config(R"("parameters": ["matrix", "bias"])"), 1), by_pattern));
  EXPECT_TRUE(bit_equal(train_bowl(config(R"("parameters": "matrix", "match": "b*s")"), 1), by_pattern));
  EXPECT_FALSE(bit_equal(train_bowl(config(R"("parameters": ["matri?", "bias"])"), 1), by_pattern));
  const EngineConfig resolved = config(R"("parameters": "matrix")");
  EXPECT_EQ(parse_engine_config(dump_resolved(resolved), {.world_size = 1}).optimizer, resolved.optimizer);
}

TEST(ParamGroups, SomeMayHaveMomentum) {
  Bowl plain;
  fill_parameters(*plain, 1);
  using torch::optim::OptimizerParamGroup;
  using torch::optim::SGDOptions;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{plain->weight, plain->bias, plain->norm_weight},
                      std::make_unique<SGDOptions>(0.01));
  groups.emplace_back(std::vector<at::Tensor>{plain->matrix},
                      std::make_unique<SGDOptions>(SGDOptions(0.01).momentum(0.9)));
  torch::optim::SGD optimizer(groups, SGDOptions(0.01));
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    plain->forward().backward();
    optimizer.step();
  }
  Tensors expected;
  for (const auto& item : plain->named_parameters()) expected[item.key()] = item.value().detach();
  for (int stage = 0; stage <= 3; ++stage) {
    EngineConfig config = bowl_config(stage);
    config.optimizer = {.options = tessera::SGDOptions{.lr = 0.01},
                        .param_groups = {{.match = {"matrix"}, .params = {{"momentum", 0.9}}}}};
    EXPECT_LT(largest_difference(train_bowl(config, 2), expected), 1e-6) << stage;
  }
}

TEST(ParamGroups, TheConfigsComeBeforeInitOptionsAndTheFirstMatchWins) {
  EngineConfig config = bowl_config(1);
  config.optimizer.param_groups = {{.match = {"matrix"}, .params = {{"lr", 0.5}}}};
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    auto engine =
        initialize(model, config, comm, {.param_groups = {{.match = {"*"}, .params = {{"lr", 0.25}}}}});
    EXPECT_EQ(engine->learning_rates(), (std::vector<double>{0.02, 0.5, 0.25}));
    const zero::Layout& layout = engine->sharded_model().layout();
    EXPECT_EQ(layout.parameters()[layout.find("matrix")].group, 1);
    EXPECT_EQ(layout.parameters()[layout.find("bias")].group, 2);
    EXPECT_EQ(engine->config().optimizer.param_groups.size(), 2U)
        << "what was resolved can be saved with the run";
  });
}

TEST(ParamGroups, WrongOnesAreNamed) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto error = [&](const ParamGroupConfig& group) {
      Bowl model;
      return error_of<ConfigError>(
          [&] { initialize(model, bowl_config(1), comm, {.param_groups = {group}}); });
    };
    EXPECT_THAT(error({.match = {"bias"}, .params = {{"weight_decai", 0}}}), HasSubstr("weight_decai"));
    EXPECT_THAT(error({.match = {"bias"}, .params = {{"momentum", 0.9}}}), HasSubstr("momentum"))
        << "AdamW has none";
    EXPECT_THAT(error({.match = {}, .params = {{"lr", 0.1}}}), HasSubstr("match"));
    EXPECT_THAT(error({.match = {"bias"}, .params = {{"lr", -1}}}), HasSubstr("lr"));
  });
}

TEST(ParamGroups, APatternThatMatchesNothingIsReported) {
  const LogFile log;
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    initialize(
        model, bowl_config(1), comm,
        {.log = log.logger(), .param_groups = {{.match = {"bias", "biases"}, .params = {{"lr", 0.1}}}}});
  });
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("no parameter of the model matches \"biases\"\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
}

TEST(ParamGroups, PatternsAreTheShells) {
  EXPECT_TRUE(glob_match("*", ""));
  EXPECT_TRUE(glob_match("*.bias", "encoder.0.bias"));
  EXPECT_TRUE(glob_match("a*b*c", "aXbYbZc"));
  EXPECT_TRUE(glob_match("layers.?.weight", "layers.3.weight"));
  EXPECT_TRUE(glob_match("**", "anything"));
  EXPECT_FALSE(glob_match("*.bias", "bias"));
  EXPECT_FALSE(glob_match("layers.?.weight", "layers.31.weight"));
  EXPECT_FALSE(glob_match("bias", "biases"));
  EXPECT_FALSE(glob_match("", "x"));
  EXPECT_FALSE(glob_match(std::string(60, '*') + "b", std::string(5000, 'a'))) << "and soon";
}

// -------------------------------------------------------------------------------------------- schedules

TEST(LearningRates, FollowTheScheduleByGroupAndAreTheOnesUsed) {
  for (int stage = 0; stage <= 3; ++stage)
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      EngineConfig config = bowl_config(stage);
      config.optimizer.options = SGDOptions{.lr = 0.05};
      config.optimizer.param_groups = {{.match = {"matrix"}, .params = {{"lr", 0.2}}}};
      config.scheduler =
          WarmupLrOptions{.warmup_min_lr = {0.001}, .warmup = {.num_steps = 5, .type = "linear"}};
      Bowl model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, config, comm);
      const LrSchedule schedule(engine->config().scheduler, {0.05, 0.2});
      std::set<double> seen;
      for (int step = 0; step < 8; ++step) {
        const std::vector<double> rates = engine->learning_rates();
        EXPECT_EQ(rates, (std::vector<double>{schedule.lr(step, 0), schedule.lr(step, 1)}));
        seen.insert(rates[1]);
        const Tensors before = full_parameters(*engine);
        engine->backward(engine->forward());
        const at::Tensor bias_gradient = engine->full_gradient("bias"),
                         matrix_gradient = engine->full_gradient("matrix");
        engine->step();
        EXPECT_TRUE(at::allclose(engine->full_parameter("bias"), before.at("bias") - bias_gradient * rates[0],
                                 1e-6, 1e-7));
        EXPECT_TRUE(at::allclose(engine->full_parameter("matrix"),
                                 before.at("matrix") - matrix_gradient * rates[1], 1e-6, 1e-7));
      }
      EXPECT_GT(seen.size(), 4U);
      EXPECT_EQ(engine->learning_rates(), (std::vector<double>{0.05, 0.2})) << "after the warm-up";
    });
}

TEST(LearningRates, DoNotAdvanceInSkippedSteps) {
  on_ranks(1, [](comm::CommunicatorPtr comm) {
    EngineConfig config = bowl_config(1);
    config.scheduler = StepLrOptions{.step_size = 1, .gamma = 0.5};
    Bowl model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, config, comm);
    const auto step = [&](double factor) {
      engine->backward(engine->forward() * factor);
      engine->step();
      return engine->learning_rates()[0];
    };
    EXPECT_EQ(step(1), 0.01);
    EXPECT_EQ(step(INFINITY), 0.01);
    EXPECT_EQ(step(1), 0.005);
    EXPECT_EQ(engine->global_steps(), 3);
    EXPECT_EQ(engine->skipped_steps(), 1);
  });
}

}  // namespace
}  // namespace tessera::testing
