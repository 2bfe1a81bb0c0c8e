// A formula from outside (examples/project/rmsprop.h) through the engine: against torch::optim's, and the
// same at every stage.
#include "zero/optimizer/update_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/rmsprop.h>

#include "core/files/temporary_folder.h"
#include "engine/checkpointing.h"
#include "examples/project/rmsprop.h"
#include "tests/support/losses.h"

namespace tessera::testing::update_rule {
namespace {

using ::testing::HasSubstr;
constexpr int kSteps = 20;

EngineConfig config_at(int stage) {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.zero.stage = stage;
  config.zero.unit_numel = 200;  // two units hold two parameters, and shards cut through all
  config.zero.param_persistence_threshold = 0;
  config.optimizer.options =
      AdamWOptions{.lr = 0.01, .weight_decay = 0.1};  // only lr and weight_decay are used
  return config;
}

InitOptions with_rmsprop() {
  InitOptions options;
  options.update_rule = std::make_shared<RMSprop>();
  return options;
}

template <class Engine>
void train(Engine& engine, int steps) {
  for (int step = 0; step < steps; ++step) {
    engine.backward(engine.forward());
    engine.step();
  }
}

Tensors engine_weights(int world, const EngineConfig& config) {
  Tensors weights;
  on_ranks(world, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, config, comm, with_rmsprop());
    train(*engine, kSteps);
    Tensors mine = full_parameters(*engine);
    if (comm->rank() == 0) weights = std::move(mine);
  });
  return weights;
}

Tensors plain_weights(const std::function<void(torch::optim::RMSprop&)>& change = {}) {
  Bowl model;
  fill_parameters(*model, 1);
  torch::optim::RMSprop optimizer(model->parameters(), torch::optim::RMSpropOptions(0.01).weight_decay(0.1));
  if (change) change(optimizer);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    model->forward().backward();
    optimizer.step();
  }
  Tensors weights;
  for (const auto& item : model->named_parameters()) weights[item.key()] = item.value().detach();
  return weights;
}

TEST(UpdateRule, EqualsTorchsAndItselfEverywhere) {
  const Tensors plain = plain_weights();
  const Tensors one = engine_weights(1, config_at(0));
  EXPECT_LT(largest_difference(one, plain), 1e-6);
  Tensors same_bits;
  for (int world = 1; world <= 3; ++world)
    for (int stage = 0; stage <= 3; ++stage) {
      const Tensors weights = engine_weights(world, config_at(stage));
      EXPECT_LT(largest_difference(weights, one), 1e-6) << "world " << world << " stage " << stage;
      // Sums of more than two gradients have one order in shared memory and, from stage 1 on, over Gloo.
      const int first = world <= 2 || in_shared_memory() ? 0 : 1;
      if (stage == first) same_bits = weights;
      if (stage > first) {
        EXPECT_TRUE(bit_equal(weights, same_bits)) << "world " << world << " stage " << stage;
      }
    }
}

TEST(UpdateRule, ClippingScheduleAndLossScaleComeBeforeIt) {
  EngineConfig config = config_at(2);
  config.fp16.enabled = true;
  config.fp16.loss_scale = 1024;
  config.gradient_clipping = 1e-3;
  const Tensors scaled = engine_weights(2, config);
  config.fp16.loss_scale = 64;
  const Tensors other = engine_weights(2, config);
  EXPECT_LT(largest_difference(scaled, other), 2e-2) << "the scale is taken out before the formula";
  config.gradient_clipping = 0;
  config.fp16.enabled = false;
  config.optimizer.param_groups = {{.match = {"*"}, .params = {{"lr", 0.0}, {"weight_decay", 0.0}}}};
  Bowl model;
  fill_parameters(*model, 1);
  Tensors before;
  for (const auto& item : model->named_parameters()) before[item.key()] = item.value().detach();
  EXPECT_TRUE(bit_equal(engine_weights(2, config), before)) << "a group's rate of 0 moves nothing";
}

TEST(UpdateRule, CheckpointsHaveItsNameAndStates) {
  const TemporaryFolder folder("update_rule");
  Tensors saved;
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, config_at(2), comm, with_rmsprop());
    train(*engine, 3);
    engine->save_checkpoint(folder.path().string());
    train(*engine, 3);
    Tensors mine = full_parameters(*engine);
    if (comm->rank() == 0) saved = std::move(mine);
  });
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    fill_parameters(*model, 2);
    auto engine = initialize(model, config_at(3), comm, with_rmsprop());
    engine->load_checkpoint(folder.path().string());
    train(*engine, 3);
    EXPECT_LT(largest_difference(full_parameters(*engine), saved), 1e-6) << "states came along";
    Bowl other;
    auto adamw = initialize(other, config_at(3), comm);
    EXPECT_THAT(error_of([&] { adamw->load_checkpoint(folder.path().string()); }),
                AllOf(HasSubstr("RMSprop"), HasSubstr("AdamW")));
  });
}

struct OfNames final : zero::UpdateRule {
  explicit OfNames(std::vector<std::string> states) : states(std::move(states)) {}
  std::string name() const override { return "OfNames"; }
  std::vector<std::string> state_names() const override { return states; }
  void update(const Elements&, const Step&) const override {}
  std::vector<std::string> states;
};

TEST(UpdateRule, StatesNeedNamesThatCheckpointsCanHave) {
  for (const std::vector<std::string>& states :
       {std::vector<std::string>{""}, {"square-avg"}, {"master"}, {"a", "b", "a"}, {"../a"}}) {
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Bowl model;
      InitOptions options;
      options.update_rule = std::make_shared<OfNames>(states);
      EXPECT_THAT(error_of([&] { initialize(model, config_at(1), comm, options); }),
                  AllOf(HasSubstr("update rule OfNames"), HasSubstr("is named")))
          << states.front();
    });
  }
}

struct Broken final : zero::UpdateRule {
  std::string name() const override { return "Broken"; }
  std::vector<std::string> state_names() const override { return {}; }
  void update(const Elements&, const Step&) const override { throw Error("the rule broke"); }
};

TEST(UpdateRule, AnUpdateThatThrowsEndsTraining) {
  for (int stage = 0; stage <= 3; ++stage) {
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Bowl model;
      InitOptions options;
      options.update_rule = std::make_shared<Broken>();
      auto engine = initialize(model, config_at(stage), comm, options);
      engine->backward(engine->forward());
      EXPECT_EQ(error_of([&] { engine->step(); }), "the rule broke") << "stage " << stage;
      const at::NoGradGuard no_grad;
      // Values that are neither old nor new cannot be read, except where they need no gather.
      if (stage == 0)
        model->forward();
      else
        EXPECT_THAT(error_of([&] { model->forward(); }), HasSubstr("the rule broke"));
      EXPECT_EQ(error_of([&] { engine->backward(engine->forward()); }), "the rule broke")
          << "stage " << stage;
    });
  }
}

TEST(UpdateRule, RanksWithOtherRulesAreRefused) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    const std::string error = error_of(
        [&] { initialize(model, config_at(1), comm, comm->rank() == 0 ? with_rmsprop() : InitOptions{}); });
    EXPECT_THAT(error, HasSubstr("update_rule"));
  });
}

}  // namespace
}  // namespace tessera::testing::update_rule
