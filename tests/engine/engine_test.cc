// The Engine's calls, one by one: accumulation, parameters by name, and what initialize() checks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class EngineAt : public ::testing::TestWithParam<int> {};  // stage
INSTANTIATE_TEST_SUITE_P(Stages, EngineAt, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

// ------------------------------------------------------------------------------------ accumulation

TEST_P(EngineAt, TheBoundaryIsTheLastMicroStepHoweverStepIsCalled) {
  for (const bool step_each : {true, false}) {
    SCOPED_TRACE(step_each ? "step() after each backward()" : "step() at the boundary only");
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Case c = small_units(1, GetParam());
      c.accumulation = 3;
      auto engine = mlp_engine(c, comm);
      for (int micro = 0; micro < 9; ++micro) {
        SCOPED_TRACE(micro);
        const bool last = micro % 3 == 2;
        const at::Tensor loss = engine->forward(randn({2, 7}, micro), randn({2, 3}, micro));
        EXPECT_EQ(engine->is_gradient_accumulation_boundary(), last) << "before backward";
        engine->backward(loss);
        EXPECT_EQ(engine->is_gradient_accumulation_boundary(), last) << "after backward";
        {
          const at::NoGradGuard no_grad;  // e.g. for a metric
          engine->forward(randn({2, 7}, 0), randn({2, 3}, 0));
        }
        if (last) {
          EXPECT_TRUE(engine->is_gradient_accumulation_boundary())
              << "a forward on the side must not hide it";
        }
        if (step_each || last) engine->step();
        EXPECT_EQ(engine->micro_steps(), micro + 1);
        EXPECT_EQ(engine->global_steps(), (micro + 1) / 3);
      }
    });
  }
}

TEST_P(EngineAt, StepBetweenBoundariesAndTwiceDoesNothing) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(1, GetParam());
    c.accumulation = 2;
    auto engine = mlp_engine(c, comm);
    const at::Tensor before = engine->full_parameter("fc1.weight");
    engine->step();
    engine->backward(step_loss(*engine, 0));
    engine->step();
    EXPECT_EQ(engine->global_steps(), 0);
    EXPECT_TRUE(at::equal(engine->full_parameter("fc1.weight"), before));
    engine->backward(step_loss(*engine, 1));
    engine->step();
    const at::Tensor after = engine->full_parameter("fc1.weight");
    EXPECT_FALSE(at::equal(after, before));
    engine->step();
    EXPECT_EQ(engine->global_steps(), 1);
    EXPECT_TRUE(at::equal(engine->full_parameter("fc1.weight"), after));
  });
}

TEST_P(EngineAt, TheCallersBoundaryTakesThePlaceOfTheConfiguredNumber) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.accumulation = 3;
    // 2 and 4 micro-steps instead of 3, of losses that are divided by the caller.
    for (const int num_micro_steps : {2, 4}) {
      Case expected = c;
      expected.accumulation = num_micro_steps;
      auto other = mlp_engine(expected, comm);
      auto same = mlp_engine(c, comm);
      for (int micro = 0; micro < num_micro_steps; ++micro) {
        other->backward(step_loss(*other, micro));
        same->set_gradient_accumulation_boundary(micro == num_micro_steps - 1);
        EXPECT_EQ(same->is_gradient_accumulation_boundary(), micro == num_micro_steps - 1);
        same->backward(step_loss(*same, micro) / num_micro_steps, /*average=*/false);
        same->step();
        EXPECT_EQ(same->global_steps(), micro == num_micro_steps - 1 ? 1 : 0);
      }
      other->step();
      EXPECT_TRUE(
          at::allclose(same->full_parameter("fc1.weight"), other->full_parameter("fc1.weight"), 1e-6, 1e-7));
    }
  });
}

TEST_P(EngineAt, RatesOfTheCallerTakeThePlaceOfTheSchedule) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const Case c = small_units(2, GetParam());
    auto engine = mlp_engine(c, comm);
    const at::Tensor before = engine->full_parameter("fc1.weight");
    EXPECT_THAT(error_of([&] { engine->set_learning_rates({1, 2}); }),
                HasSubstr("2 rates for 1 param groups"));
    EXPECT_THAT(error_of([&] { engine->set_learning_rates({NAN}); }), HasSubstr("expected finite numbers"));
    EXPECT_THAT(error_of([&] { engine->set_schedule_steps(-1); }),
                HasSubstr("found -1; expected at least 0"));
    engine->set_learning_rates({0});
    EXPECT_EQ(engine->learning_rates(), std::vector<double>{0});
    engine->backward(step_loss(*engine, 0));
    engine->step();
    EXPECT_TRUE(at::equal(engine->full_parameter("fc1.weight"), before));

    auto configured = mlp_engine(c, comm), given = mlp_engine(c, comm);
    given->set_learning_rates(configured->learning_rates());
    for (const auto& one : {configured, given}) {
      one->backward(step_loss(*one, 0));
      one->step();
    }
    EXPECT_TRUE(at::equal(given->full_parameter("fc1.weight"), configured->full_parameter("fc1.weight")));
    EXPECT_FALSE(at::equal(given->full_parameter("fc1.weight"), before));
  });
}

// ------------------------------------------------------------------------------ parameters by name

TEST_P(EngineAt, ParametersAndGradientsByNameAndAlias) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    Odds model, plain;
    fill_parameters(*model, 1);
    fill_parameters(*plain, 1);
    auto engine = initialize(model, engine_config(c), comm);
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(at::equal(engine->full_parameter(item.key()), item.value())) << item.key();
    EXPECT_THAT(error_of([&] { engine->full_gradient("middle.weight"); }), HasSubstr("there is none yet"));
    engine->backward(odds_loss(*model, 0, 0, 2));  // the same samples on both ranks
    odds_loss(*plain, 0, 0, 2).backward();
    for (const auto& item : plain->named_parameters()) {
      if (!item.value().requires_grad()) {
        EXPECT_THAT(error_of([&] { engine->full_gradient(item.key()); }),
                    HasSubstr(item.key() + " is frozen"));
        continue;
      }
      const at::Tensor expected =
          item.value().grad().defined() ? item.value().grad() : at::zeros_like(item.value());
      EXPECT_TRUE(at::allclose(engine->full_gradient(item.key()), expected, 1e-5, 1e-7)) << item.key();
    }
    EXPECT_TRUE(at::equal(engine->full_gradient("decoder_weight"), engine->full_gradient("table.weight")));
    EXPECT_TRUE(at::equal(engine->full_parameter("decoder_weight"), engine->full_parameter("table.weight")));
    for (const std::string name : {"middle", "middle.weights", ""}) {
      EXPECT_THAT(error_of([&] { engine->full_parameter(name); }), HasSubstr("no parameter named " + name));
      EXPECT_THAT(error_of([&] { engine->full_gradient(name); }), HasSubstr("no parameter named " + name));
    }
    const at::Tensor copy = engine->full_parameter("middle.weight");
    copy.zero_();
    EXPECT_FALSE(at::equal(engine->full_parameter("middle.weight"), copy)) << "it is a copy";
  });
}

TEST_P(EngineAt, GradientsInTheMiddleOfAccumulationAreThoseSoFar) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    auto whole = mlp_engine(c, comm);
    whole->backward(step_loss(*whole, 0));
    c.accumulation = 2;
    auto engine = mlp_engine(c, comm);
    engine->backward(step_loss(*engine, 0));
    EXPECT_TRUE(at::equal(engine->full_gradient("fc1.weight"), whole->full_gradient("fc1.weight") / 2));
    engine->backward(step_loss(*engine, 1));
    const at::Tensor gradient = engine->full_gradient("fc1.weight");
    engine->step();
    EXPECT_TRUE(at::equal(engine->full_gradient("fc1.weight"), gradient))
        << "they stay until the next backward()";
  });
}

// -------------------------------------------------------------------------------------- starting out

TEST(Engine, CompletesAConfigMadeInCpp) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    EngineConfig config;
    config.train_batch_size = 24;
    config.gradient_accumulation_steps = 3;
    Mlp model;
    auto engine = initialize(model, config, comm);
    EXPECT_EQ(engine->config().train_micro_batch_size_per_gpu, 4);
    EXPECT_EQ(std::get<AdamWOptions>(engine->config().optimizer.options).lr, engine->learning_rates()[0]);
  });
}

TEST(Engine, RefusesConfigsThatCannotWork) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto error = [&](EngineConfig config) {
      Mlp model;
      return error_of<ConfigError>([&] { initialize(model, config, comm); });
    };
    Case two = small_units(2, 1);
    const std::string triple = error(engine_config(two));
    EXPECT_THAT(triple, HasSubstr("train_batch_size"));
    EXPECT_THAT(triple, HasSubstr("4"));
    EXPECT_EQ(triple.find('\n'), std::string::npos);
    EngineConfig config = engine_config(small_units(1, 4));
    EXPECT_THAT(error(config), HasSubstr("zero_optimization.stage"));
    config = engine_config(small_units(1, 0));
    config.optimizer.options = AdamWOptions{.lr = -3};
    EXPECT_THAT(error(config), HasSubstr("optimizer.params.lr: found -3"));
  });
}

TEST(Engine, RefusesRanksWithDifferentConfigs) {
  std::string lines[2];
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Mlp model;
    EngineConfig config = engine_config(small_units(2, comm->rank() == 0 ? 2 : 3));
    config.seed = comm->rank();  // may well differ
    lines[comm->rank()] = error_of([&] { initialize(model, config, comm); });
  });
  EXPECT_EQ(lines[0],
            "zero_optimization.stage is 2 on rank 0, but 3 on rank 1; expected the same on all ranks");
  EXPECT_EQ(lines[1], lines[0]);
}

}  // namespace
}  // namespace tessera::testing
