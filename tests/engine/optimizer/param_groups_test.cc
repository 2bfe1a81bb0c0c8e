// Param groups by name pattern, from JSON and from C++, beside those of torch::optim; learning rates with a
// schedule. Each optimizer's options in groups: tests/engine/client_optimizer_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "core/str.h"
#include "engine/optimizer/optimizer_setup.h"
#include "tests/engine/optimizer/bowls.h"
#include "tests/support/log_file.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

const OptimizerOptions kAdamW = AdamWOptions{.lr = 0.02, .weight_decay = 0.3};
const ParamGroupConfig kNoDecay{.match = {"bias", "norm*"}, .params = {{"weight_decay", 0.0}}};
const ParamGroupConfig kMatrix{.match = {"m?trix"},
                               .params = {{"lr", 0.05}, {"beta1", 0.8}, {"beta2", 0.95}}};

TEST(ParamGroups, FromCppAndFromJsonEqualTorchOptims) {
  const Tensors expected = plain_bowl([](BowlImpl& model) {
    using torch::optim::AdamWOptions;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    const auto add = [&](const std::vector<at::Tensor>& parameters, const AdamWOptions& options) {
      groups.emplace_back(parameters, std::make_unique<AdamWOptions>(options));
    };
    const AdamWOptions all = AdamWOptions(0.02).weight_decay(0.3);
    add({model.weight}, all);
    add({model.bias, model.norm_weight}, AdamWOptions(all).weight_decay(0));
    add({model.matrix}, AdamWOptions(all).lr(0.05).betas({0.8, 0.95}));
    return std::make_unique<torch::optim::AdamW>(groups, all);
  });
  const Tensors from_cpp = bowl_weights(2, bowl_config(2, kAdamW), {.param_groups = {kNoDecay, kMatrix}});
  EXPECT_LT(largest_difference(from_cpp, expected), 2e-6);
  EXPECT_GT(largest_difference(bowl_weights(1, bowl_config(0, kAdamW)), expected), 1e-3)
      << "the groups must matter";
  const EngineConfig config = parse_engine_config(R"({
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "unit_numel": 200},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.3}, "param_groups": [
      {"match": ["bias", "norm*"], "weight_decay": 0},
      {"match": "m?trix", "lr": 0.05, "betas": [0.8, 0.95]}
    ]}
  })",
                                                  {.world_size = 2});
  EXPECT_TRUE(bit_equal(bowl_weights(2, config), from_cpp));
}

TEST(ParamGroups, OfJsonMayHaveNamesInPlaceOfPatterns) {
  const auto config = [](const char* group) {
    return parse_engine_config(str(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
      "optimizer": {"type": "SGD", "params": {"lr": 0.01}, "param_groups": [{)",
                                   group, R"(, "lr": 0.05}]}})"),
                               {.world_size = 1});
  };
  const Tensors by_pattern = bowl_weights(1, config(R"("match": ["matrix", "bias"])"));
  EXPECT_TRUE(bit_equal(bowl_weights(1, config(R"("parameters": ["matrix", "bias"])")), by_pattern));
  EXPECT_TRUE(bit_equal(bowl_weights(1, config(R"("parameters": "matrix", "match": "b*s")")), by_pattern));
  EXPECT_FALSE(bit_equal(bowl_weights(1, config(R"("parameters": ["matri?", "bias"])")), by_pattern));
  const EngineConfig resolved = config(R"("parameters": "matrix")");
  EXPECT_EQ(parse_engine_config(dump_resolved(resolved), {.world_size = 1}).optimizer, resolved.optimizer);
}

TEST(ParamGroups, TheConfigsComeBeforeInitOptionsAndTheFirstMatchWins) {
  EngineConfig config = bowl_config(1, kAdamW);
  config.optimizer.param_groups = {{.match = {"matrix"}, .params = {{"lr", 0.5}}}};
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto engine =
        bowl_engine(config, comm, {.param_groups = {{.match = {"*"}, .params = {{"lr", 0.25}}}}});
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
      return error_of<ConfigError>(
          [&] { bowl_engine(bowl_config(1, kAdamW), comm, {.param_groups = {group}}); });
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
    EngineConfig config = bowl_config(1, kAdamW);
    config.zero.leaf_module.names = {"matrix"};
    initialize(model, config, comm,
               {.log = log.logger(),
                .param_groups = {{.match = {"bias", "biases"}, .params = {{"lr", 0.1}}}},
                .untrained = {"matrix", "matrices"}});
  });
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("no parameter of the model matches \"biases\"\n"));
  EXPECT_THAT(text, HasSubstr("InitOptions::untrained: the model has no parameter \"matrices\"\n"));
  EXPECT_THAT(text, HasSubstr("zero_optimization.leaf_module: no effect outside of Python\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
}

TEST(ParamGroups, MayChangeLaterButForWhatDecidesAboutStates) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto set = [](Engine& engine, const auto& change) {
      kernels::Hyper hyper = engine.sharded_model().optimizer().groups().at(0);
      change(hyper);
      engine.set_hyper(0, hyper);
    };
    const auto changed = bowl_engine(bowl_config(1, SGDOptions{.lr = 0.05}), comm);
    set(*changed, [](kernels::Hyper& hyper) { hyper.weight_decay = 0.3; });
    train_bowl(*changed, 2);
    const auto expected = bowl_engine(bowl_config(1, SGDOptions{.lr = 0.05, .weight_decay = 0.3}), comm);
    train_bowl(*expected, 2);
    EXPECT_TRUE(bit_equal(full_parameters(*changed), full_parameters(*expected)));

    const auto error = [&](const OptimizerOptions& options, const auto& change) {
      EngineConfig config = bowl_config(1, options);
      if (std::holds_alternative<SGDOptions>(options))
        config.optimizer.param_groups = {{.match = {"matrix"}, .params = {{"momentum", 0.9}}}};
      const auto engine = bowl_engine(config, comm);
      train_bowl(*engine, 1);
      const std::vector<kernels::Hyper> before = engine->sharded_model().optimizer().groups();
      std::string text = error_of([&] { set(*engine, change); });
      EXPECT_EQ(engine->sharded_model().optimizer().groups(), before) << text;
      return text;
    };
    EXPECT_THAT(error(AdamWOptions{}, [](kernels::Hyper& hyper) { hyper.amsgrad = true; }),
                HasSubstr("amsgrad, which no param group had at initialize()"));
    EXPECT_THAT(error(RMSpropOptions{}, [](kernels::Hyper& hyper) { hyper.momentum = 0.9; }),
                HasSubstr("momentum 0.9, which no param group had at initialize()"));
    EXPECT_THAT(error(RMSpropOptions{}, [](kernels::Hyper& hyper) { hyper.centered = true; }),
                HasSubstr("centered was changed after initialize()"));
    EXPECT_THAT(error(SGDOptions{}, [](kernels::Hyper& hyper) { hyper.momentum = hyper.dampening = 0.5; }),
                HasSubstr("momentum 0.5 and dampening 0.5 after steps without momentum"));
    EXPECT_THAT(error(MuonOptions{}, [](kernels::Hyper& hyper) { hyper.use_muon = false; }),
                HasSubstr("use_muon was changed after initialize()"));
    EXPECT_THAT(error(MuonOptions{}, [](kernels::Hyper& hyper) { hyper.adam_lr_ratio = -1; }),
                HasSubstr("adam_lr_ratio is -1; expected a number of at least 0"));
    EXPECT_THAT(error(AdamWOptions{}, [](kernels::Hyper& hyper) { hyper.eps = NAN; }),
                HasSubstr("eps is nan; expected a finite number"));
    EXPECT_THAT(error_of([&] { changed->set_hyper(1, {}); }), HasSubstr("param group 1; expected 0 to 0"));
  });
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
      EngineConfig config = bowl_config(stage, SGDOptions{.lr = 0.05});
      config.optimizer.param_groups = {{.match = {"matrix"}, .params = {{"lr", 0.2}}}};
      config.scheduler =
          WarmupLrOptions{.warmup_min_lr = {0.001}, .warmup = {.num_steps = 5, .type = "linear"}};
      const auto engine = bowl_engine(config, comm);
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

}  // namespace
}  // namespace tessera::testing
