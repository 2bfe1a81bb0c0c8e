// What the Engine refuses, and its state after an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/str.h"
#include "engine/checkpointing.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "tests/support/log_file.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

class EngineErrors : public ::testing::TestWithParam<int> {};  // stage
INSTANTIATE_TEST_SUITE_P(Stages, EngineErrors, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

TEST_P(EngineErrors, RefusesWhatCannotBeMeantAndGoesOn) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto train = [&](bool with_errors) {
      auto engine = mlp_engine(small_units(2, GetParam()), comm);
      const auto refused = [&](const at::Tensor& loss, const char* what) {
        if (!with_errors) return;
        EXPECT_THAT(error_of([&] { engine->backward(loss); }), HasSubstr(what));
      };
      for (int step = 0; step < 3; ++step) {
        refused(at::ones({2}, at::TensorOptions().requires_grad(true)),
                "needs a scalar loss, found a tensor of 2 elements");
        refused(at::Tensor(), "an undefined tensor");
        refused(at::ones({}), "depends on the parameters");
        if (with_errors) {
          engine->eval();
          refused(step_loss(*engine, step), "in evaluation mode: call train() first");
          engine->train();
        }
        engine->backward(step_loss(*engine, step));
        refused(step_loss(*engine, step), "call step() after the last backward()");
        engine->step();
      }
      Tensors weights;
      for (const char* name : {"fc1.weight", "fc3.bias"}) weights[name] = engine->full_parameter(name);
      return weights;
    };
    EXPECT_TRUE(bit_equal(train(true), train(false)));
  });
}

TEST_P(EngineErrors, LossBackwardIsAsEngineBackward) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto train = [&](bool callers) {
      Case c = small_units(2, GetParam());
      c.accumulation = 2;
      auto engine = mlp_engine(c, comm);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor loss = step_loss(*engine, step);
        callers ? loss.backward() : engine->backward(loss);
        engine->step();
      }
      EXPECT_EQ(engine->global_steps(), 2);
      Tensors weights;
      for (const char* name : {"fc1.weight", "fc3.bias"}) weights[name] = engine->full_parameter(name);
      return weights;
    };
    EXPECT_TRUE(bit_equal(train(true), train(false)));
  });
}

TEST_P(EngineErrors, OneThatFailsHalfWayIsNotForgotten) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(2, GetParam()), comm);
    const at::Tensor x = randn({2, 7}, 1).set_requires_grad(true);
    at::Tensor bent = x * 1;
    bent.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the hook's own"); });
    EXPECT_THROW(engine->forward(bent, randn({2, 3}, 1)).backward(), std::runtime_error);
    EXPECT_TRUE(engine->has_failed());
    EXPECT_THAT(error_of([&] { engine->step(); }), HasSubstr("loss.backward() failed half-way"));
    engine->zero_grad();
    EXPECT_FALSE(engine->has_failed());
    step_loss(*engine, 0).backward();
    EXPECT_THAT(error_of([&] { engine->backward(step_loss(*engine, 1)); }), HasSubstr("call step()"));
    engine->step();
    EXPECT_EQ(engine->global_steps(), 1);
  });
}

TEST_P(EngineErrors, GradientsOfOtherTensorsMayBeTaken) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(1, GetParam()), comm);
    const at::Tensor x = randn({2, 7}, 5).set_requires_grad(true);
    const at::Tensor loss = engine->forward(x, randn({2, 3}, 6));
    EXPECT_TRUE(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0].defined());
    engine->backward(loss);
    engine->step();
  });
}

TEST_P(EngineErrors, ZeroGradBetweenBackwardAndStepGivesTheStepUp) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto train = [&](bool with_more) {
      auto engine = mlp_engine(small_units(2, GetParam()), comm);
      for (int step = 0; step < 3; ++step) {
        if (with_more) {
          engine->backward(step_loss(*engine, step + 10));
          EXPECT_TRUE(engine->update_is_due());
          engine->zero_grad();
          EXPECT_FALSE(engine->update_is_due());
          EXPECT_THAT(error_of([&] { engine->full_gradient("fc1.weight"); }), HasSubstr("has discarded"));
          engine->step();
        }
        engine->zero_grad();
        engine->backward(step_loss(*engine, step));
        engine->step();
      }
      EXPECT_EQ(engine->global_steps(), 3);
      return engine->full_parameter("fc1.weight");
    };
    EXPECT_TRUE(at::equal(train(true), train(false)));
  });
}

TEST_P(EngineErrors, GradientsThatWereDroppedCannotBeRead) {
  const TestFolder folder("dropped_gradients");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(2, GetParam()), comm);
    const auto train = [&](bool with_step) {
      engine->backward(step_loss(*engine, 0));
      EXPECT_GT(engine->full_gradient("fc1.weight").count_nonzero().item<int64_t>(), 0);
      if (with_step) engine->step();
    };
    const auto expect_none = [&](const char* after) {
      EXPECT_THAT(error_of([&] { engine->full_gradient("fc1.weight"); }), HasSubstr("has discarded"))
          << after;
    };
    for (const bool with_step : {true, false}) {
      train(with_step);
      engine->drop_gradients();
      expect_none("drop_gradients()");
    }
    train(true);
    engine->save_checkpoint(folder.string());
    for (const bool with_step : {true, false}) {
      train(with_step);
      engine->load_checkpoint(folder.string());
      expect_none("load_checkpoint()");
    }
    auto other = mlp_engine(small_units(2, GetParam()), comm->duplicate("other"));
    other->load_checkpoint(folder.string());
    EXPECT_THAT(error_of([&] { other->full_gradient("fc1.weight"); }), HasSubstr("has discarded"));
    train(true);
  });
}

TEST_P(EngineErrors, AMomentumThatTheScheduleHasRaisedToOneIsRefused) {
  const TestFolder folder("risen_momentum");
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.optimizer = "AdamW";
    c.config.scheduler = OneCycleOptions{.cycle_min_lr = {1e-3},
                                         .cycle_max_lr = {1e-2},
                                         .cycle_first_step_size = 1,
                                         .decay_step_size = 1,
                                         .cycle_max_mom = {0.9},
                                         .decay_mom_rate = 0.05};
    auto engine = mlp_engine(c, comm);
    for (int step = 0; step < 5; ++step) {  // 2 of the cycle; then 0.9 times 1, 1.05, 1.1
      engine->backward(step_loss(*engine, step));
      engine->step();
    }
    const at::Tensor weights = engine->full_parameter("fc1.weight");
    engine->backward(step_loss(*engine, 5));
    EXPECT_THAT(error_of<ConfigError>([&] { engine->step(); }),
                HasSubstr("scheduler.params.decay_mom_rate: the momentum has risen to 1.035 after 5 steps"));
    engine->zero_grad();
    EXPECT_TRUE(at::equal(engine->full_parameter("fc1.weight"), weights));
    EXPECT_EQ(engine->global_steps(), 5);
    engine->save_checkpoint(folder.string());
    engine->backward(step_loss(*engine, 5));

    c.optimizer = "SGD";  // has no betas that it could move
    auto plain = mlp_engine(c, comm->duplicate("plain"));
    for (int step = 0; step < 7; ++step) {
      plain->backward(step_loss(*plain, step));
      plain->step();
    }
  });
}

TEST_P(EngineErrors, RanksWithOtherRatesAreRefused) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const Case c = small_units(2, GetParam());
    const auto train = [&](bool with_error) {
      auto engine = mlp_engine(c, comm);
      for (int step = 0; step < 3; ++step) {
        if (with_error) {
          engine->set_learning_rates({engine->rank() == 1 && step == 1 ? 0.25 : 0.125});
          engine->backward(step_loss(*engine, step));
          if (step == 1) {
            EXPECT_THAT(
                error_of([&] { engine->step(); }),
                HasSubstr("param group 0 has lr 0.125 on rank 0, but 0.25 on rank 1; expected the same"));
            EXPECT_FALSE(engine->has_failed());
            EXPECT_EQ(engine->global_steps(), 1);
          }
        }
        engine->set_learning_rates({0.125});
        if (!with_error || step == 1) engine->backward(step_loss(*engine, step));
        engine->step();
      }
      return engine->full_parameter("fc1.weight");
    };
    EXPECT_TRUE(at::equal(train(true), train(false)));
  });
}

TEST_P(EngineErrors, AGradientThatWasTakenCannotBeReadOrReplaced) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(1, GetParam()), comm);
    at::Tensor weight = engine->module().named_parameters()["fc1.weight"];
    engine->backward(step_loss(*engine, 0));
    try {
      weight.grad().norm();
      FAIL() << "a norm of nothing";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  HasSubstr("the gradient of parameter fc1.weight is not in its grad"));
    }
    weight.mutable_grad() = at::ones_like(weight);
    EXPECT_THAT(error_of([&] { engine->step(); }), HasSubstr("fc1.weight: its grad was written"));
    engine->zero_grad();
    engine->backward(step_loss(*engine, 0));
    engine->step();
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_EQ(engine->global_steps(), 1);
  });
}

TEST_P(EngineErrors, AModelBelongsToOneEngineAtATime) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    Bowl model;
    EngineConfig config;
    config.train_micro_batch_size_per_gpu = 1;
    config.zero = {.stage = GetParam(), .unit_numel = 200, .param_persistence_threshold = 0};
    auto engine = initialize(model, config, comm);
    EXPECT_THAT(
        error_of<ConfigError>([&] { initialize(model, config, comm); }),
        HasSubstr("parameter weight belongs to an engine: initialize() was called on this model before"));
    engine->backward(engine->forward());
    engine->step();
    const at::Tensor weight = engine->full_parameter("weight");
    engine.reset();
    auto second = initialize(model, config, comm);
    EXPECT_TRUE(at::equal(second->full_parameter("weight"), weight));
    second->backward(second->forward());
    second->step();
    EXPECT_FALSE(at::equal(second->full_parameter("weight"), weight));
  });
}

TEST_P(EngineErrors, AFailedBackwardIsNotForgotten) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(1, GetParam()), comm);
    engine->backward(step_loss(*engine, 0));
    engine->step();
    const at::Tensor x = randn({2, 7}, 1).set_requires_grad(true);
    at::Tensor bent = x * 1;
    bent.register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("the hook's own trouble\nsecond line");
    });
    const at::Tensor loss = engine->forward(bent, randn({2, 3}, 1));
    EXPECT_THROW(engine->backward(loss), std::runtime_error);
    const std::string expected =
        "an earlier backward() or step() failed and left gradients or parameters incomplete: the hook's own "
        "trouble";
    EXPECT_EQ(error_of([&] { engine->step(); }), expected);
    EXPECT_EQ(error_of([&] { engine->backward(loss); }), expected);
    EXPECT_EQ(error_of([&] { engine->forward(randn({2, 7}, 1), randn({2, 3}, 1)); }), expected);
    EXPECT_EQ(error_of([&] { engine->full_gradient("fc1.weight"); }), expected);
    EXPECT_EQ(engine->full_parameter("fc1.weight").numel(), 91) << "weights can still be saved";
  });
}

TEST_P(EngineErrors, ARankThatLeavesTheOthersInBackwardMakesThemFailNotHang) {
  std::string survivor;
  const std::string first = error_of([&] {
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      auto engine = mlp_engine(small_units(2, GetParam()), comm);
      for (int step = 0; step < 3; ++step) {
        if (step == 2 && comm->rank() == 1) throw DataError("data/train: truncated");
        try {
          engine->backward(step_loss(*engine, step));
          engine->step();
        } catch (const CommError& error) {
          survivor = error.what();
          EXPECT_EQ(error_of<CommError>([&] { engine->step(); }), survivor) << "and stays failed";
          throw;
        }
      }
    });
  });
  EXPECT_EQ(first, "data/train: truncated");
  EXPECT_THAT(survivor, HasSubstr("rank 1"));
}

// What only a loop can do, and is asked for in the configuration.
TEST(EngineReports, ALoopOfOnesOwnIsToldWhatItHasToReport) {
  Case c = small_units(1, 0);
  c.config.wall_clock_breakdown = true;
  c.config.monitors.csv.enabled = true;
  c.config.dump_state = true;
  for (const bool reports : {false, true}) {
    const LogFile log;
    on_ranks(1, [&](comm::CommunicatorPtr comm) {
      Mlp model;
      initialize(model, engine_config(c), comm, {.log = log.logger(), .caller_reports = reports});
    });
    EXPECT_EQ(log.text().find("wall_clock_breakdown, csv_monitor: no effect in a training loop") ==
                  std::string::npos,
              reports)
        << log.text();
    EXPECT_THAT(log.text(), HasSubstr("\"dump_state\": true"));
  }
}

}  // namespace
}  // namespace tessera::testing
