// A formula from outside (examples/project/rmsprop.h) through the engine: what comes before it, its states in
// checkpoints, and what is refused. Its numbers: optimizer_parity_test.cc.
#include "zero/optimizer/update_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/files/temporary_folder.h"
#include "engine/checkpointing.h"
#include "examples/project/rmsprop.h"
#include "tests/engine/optimizer/bowls.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

EngineConfig rule_config(int stage) {
  return bowl_config(stage, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});  // only these two are used
}

InitOptions with_rmsprop() {
  InitOptions options;
  options.update_rule = std::make_shared<RMSprop>();
  return options;
}

/// SGD as a rule.
struct Descent final : zero::UpdateRule {
  std::string name() const override { return "Descent"; }
  std::vector<std::string> state_names() const override { return {}; }
  void update(const Elements& elements, const Step& step) const override {
    at::Tensor(elements.weights).sub_(elements.gradient, step.lr);
  }
};

TEST(UpdateRule, ClippingScheduleAndLossScaleComeBeforeIt) {
  EngineConfig config = bowl_config(2, SGDOptions{.lr = 0.1});
  config.fp16 = {.enabled = true, .loss_scale = 1024};
  config.gradient_clipping = 0.5;
  config.scheduler = StepLrOptions{.step_size = 5, .gamma = 0.5};
  const Tensors as_rule = bowl_weights(2, config, {.update_rule = std::make_shared<Descent>()});
  EXPECT_LT(largest_difference(as_rule, bowl_weights(2, config)), 1e-5) << "as the engine's SGD";
  config.optimizer.param_groups = {{.match = {"*"}, .params = {{"lr", 0.0}}}};
  EXPECT_TRUE(bit_equal(bowl_weights(2, config, {.update_rule = std::make_shared<Descent>()}),
                        bowl_weights(2, config, {}, 0)))
      << "a group's rate of 0 moves nothing";
}

TEST(UpdateRule, CheckpointsHaveItsNameAndStates) {
  const TemporaryFolder folder("update_rule");
  Tensors saved;
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto engine = bowl_engine(rule_config(2), comm, {.update_rule = std::make_shared<RMSprop>()});
    train_bowl(*engine, 3);
    engine->save_checkpoint(folder.path().string());
    train_bowl(*engine, 3);
    Tensors mine = full_parameters(*engine);
    if (comm->rank() == 0) saved = std::move(mine);
  });
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto engine = bowl_engine(rule_config(3), comm, with_rmsprop());
    train_bowl(*engine, 1);  // something to be overwritten
    engine->load_checkpoint(folder.path().string());
    train_bowl(*engine, 3);
    EXPECT_LT(largest_difference(full_parameters(*engine), saved), 1e-6) << "states came along";
    const auto adamw = bowl_engine(rule_config(3), comm);
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
      EXPECT_THAT(error_of([&] {
                    bowl_engine(rule_config(1), comm, {.update_rule = std::make_shared<OfNames>(states)});
                  }),
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
      auto engine = initialize(model, rule_config(stage), comm, options);
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

struct Nothing final : zero::WholeUpdateRule {
  std::string name() const override { return "Nothing"; }
  void update(const Parameter&, const Step&) const override {}
};

TEST(UpdateRule, OtherRulesOnRanksAndTwoAtOnceAreRefused) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    EXPECT_THAT(error_of([&] {
                  bowl_engine(rule_config(1), comm, comm->rank() == 0 ? with_rmsprop() : InitOptions{});
                }),
                HasSubstr("update_rule"));
    InitOptions two = with_rmsprop();
    two.whole_optimizer = zero::make_whole_optimizer(std::make_shared<Nothing>());
    EXPECT_THAT(error_of([&] { bowl_engine(rule_config(1), comm, two); }),
                HasSubstr("update_rule beside whole_optimizer; expected one of the two"));
  });
}

}  // namespace
}  // namespace tessera::testing
