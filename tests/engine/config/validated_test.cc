// Configurations built in C++.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/config/config_testing.h"

namespace tessera {
namespace {

TEST(ConfigParse, ConfigsBuiltInCppAreCheckedTheSame) {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 4;
  config.optimizer.options = SGDOptions{.lr = 0.1, .momentum = 0.9};
  const WarmupLrOptions schedule{.warmup = {.type = "LINEAR"}};
  config.scheduler = schedule;
  EngineConfig checked = validated(config, 3);
  EXPECT_EQ(checked.train_batch_size, 12);
  EXPECT_EQ(type_of(checked.optimizer.options), "SGD");
  EXPECT_EQ(std::get<SGDOptions>(checked.optimizer.options).weight_decay, 0);
  EXPECT_EQ(std::get<WarmupLrOptions>(checked.scheduler).warmup.type, "linear")
      << "in its canonical spelling";
  EXPECT_EQ(validated(checked, 3), checked);
  const auto error = [&](const auto& change) {
    EngineConfig changed = config;
    change(changed);
    return config_error([&] { validated(changed, 1); });
  };
  EXPECT_EQ(error([](EngineConfig& c) { c.zero.stage = 5; }),
            "EngineConfig:1: zero_optimization.stage: found 5 (a number); expected an integer from 0 to 3, "
            "or \"auto\"");
  EXPECT_NE(error([](EngineConfig& c) {
              c.optimizer.param_groups = {{{"a"}, {{"learning_rate", 1}}}};
            }).find("optimizer.param_groups[0].learning_rate: unknown key"),
            std::string::npos);
  EXPECT_EQ(error([](EngineConfig& c) { c.optimizer.options = SGDOptions{.lr = -1, .nesterov = true}; }),
            "EngineConfig:1: optimizer.params.lr: found -1.0 (a number); expected a number of at least 0, or "
            "\"auto\"");
  EXPECT_EQ(error([](EngineConfig& c) { c.gradient_clipping = NAN; }),
            "EngineConfig:1: gradient_clipping: found nan (a number); expected a number of at least 0, or "
            "\"auto\"");
  const std::string scales = error([](EngineConfig& c) {
    c.fp16 = {.loss_scale = -2,
              .initial_scale_power = -1,
              .loss_scale_window = 0,
              .hysteresis = 0,
              .min_loss_scale = 0};
  });
  for (const char* key :
       {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"})
    EXPECT_NE(scales.find("fp16." + std::string(key) + ": found"), std::string::npos) << scales;
  EXPECT_EQ(error([](EngineConfig& c) { c.train_batch_size = 5; }),
            "EngineConfig: train_batch_size 5 != train_micro_batch_size_per_gpu 4 x "
            "gradient_accumulation_steps 1 x world "
            "size 1 = 4; train_batch_size 4, or train_micro_batch_size_per_gpu 5 would do");
  EngineConfig adam;
  adam.train_batch_size = 8;
  adam.optimizer.options = AdamOptions{};  // in C++ the formula itself: L2
  EXPECT_EQ(type_of(validated(adam, 1).optimizer.options), "Adam");
}

}  // namespace
}  // namespace tessera
