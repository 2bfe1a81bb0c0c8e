// The Engine's calls, one by one: what they answer, what they refuse, and what is left after an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/sequential.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<TypedEngine<MlpImpl>> mlp_engine(const Case& c, comm::CommunicatorPtr comm,
                                                 const InitOptions& options = {}) {
  Mlp model;
  fill_parameters(*model, 1);
  return initialize(model, engine_config(c), std::move(comm), options);
}

at::Tensor loss_of(TypedEngine<MlpImpl>& engine, int step) {
  return mlp_loss(engine.module(), step, 2 * engine.rank(), 2);
}

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
    engine->backward(loss_of(*engine, 0));
    engine->step();
    EXPECT_EQ(engine->global_steps(), 0);
    EXPECT_TRUE(at::equal(engine->full_parameter("fc1.weight"), before));
    engine->backward(loss_of(*engine, 1));
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
        other->backward(loss_of(*other, micro));
        same->set_gradient_accumulation_boundary(micro == num_micro_steps - 1);
        EXPECT_EQ(same->is_gradient_accumulation_boundary(), micro == num_micro_steps - 1);
        same->backward(loss_of(*same, micro) / num_micro_steps, /*average=*/false);
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
    engine->set_learning_rates({0});
    EXPECT_EQ(engine->learning_rates(), std::vector<double>{0});
    engine->backward(loss_of(*engine, 0));
    engine->step();
    EXPECT_TRUE(at::equal(engine->full_parameter("fc1.weight"), before));

    auto configured = mlp_engine(c, comm), given = mlp_engine(c, comm);
    given->set_learning_rates(configured->learning_rates());
    for (const auto& one : {configured, given}) {
      one->backward(loss_of(*one, 0));
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

TEST_P(EngineAt, GradientsInTheMiddleOfAccumulationAreRefusedNotWrong) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.accumulation = 2;
    auto engine = mlp_engine(c, comm);
    engine->backward(loss_of(*engine, 0));
    EXPECT_THAT(error_of([&] { engine->full_gradient("fc1.weight"); }),
                HasSubstr("after 1 of 2 backward() calls"));
    engine->backward(loss_of(*engine, 1));
    const at::Tensor gradient = engine->full_gradient("fc1.weight");
    engine->step();
    EXPECT_TRUE(at::equal(engine->full_gradient("fc1.weight"), gradient))
        << "they stay until the next backward()";
  });
}

TEST(Engine, SaysWhoAndWhereItIs) {
  on_ranks(3, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(3, 2);
    auto engine = mlp_engine(c, comm, {.local_rank = comm->rank() % 2});
    EXPECT_EQ(engine->rank(), comm->rank());
    EXPECT_EQ(engine->local_rank(), comm->rank() % 2);
    EXPECT_EQ(engine->world_size(), 3);
    EXPECT_EQ(engine->device(), at::Device(at::kCPU));
    EXPECT_EQ(engine->config().zero.stage, 2);
    EXPECT_EQ(&engine->comm(), comm.get());
  });
}

// -------------------------------------------------------------------------------------- starting out

TEST_P(EngineAt, InitialParametersAndBuffersAreRankZeros) {
  on_ranks(3, [&](comm::CommunicatorPtr comm) {
    NormNet model, reference;
    fill_parameters(*model, 1 + 500 * comm->rank());
    fill_parameters(*reference, 1);
    {
      const at::NoGradGuard no_grad;
      model->norm->running_mean.fill_(comm->rank() + 5);
      model->norm->num_batches_tracked.fill_(comm->rank() + 7);
    }
    auto engine = initialize(model, engine_config(small_units(3, GetParam())), comm);
    for (const auto& item : reference->named_parameters())
      EXPECT_TRUE(at::equal(engine->full_parameter(item.key()), item.value())) << item.key();
    EXPECT_TRUE(at::equal(model->norm->running_mean, at::full({24}, 5.0)));
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 7);
  });
}

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

TEST(Engine, RefusesRanksWithDifferentModelsOrConfigs) {
  std::string lines[2];
  const auto run = [&](const std::function<void(comm::CommunicatorPtr)>& body) {
    on_ranks(2, [&](comm::CommunicatorPtr comm) { lines[comm->rank()] = error_of([&] { body(comm); }); });
  };
  run([](comm::CommunicatorPtr comm) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4));
    if (comm->rank() == 1) model->push_back(torch::nn::Linear(4, 4));
    initialize(model, engine_config(small_units(2, 2)), comm);
  });
  EXPECT_THAT(lines[0], HasSubstr("rank 0's model has 2 parameters of 20 elements"));
  EXPECT_THAT(lines[0], HasSubstr("rank 1's has 4 parameters of 40 elements"));
  EXPECT_THAT(lines[1], HasSubstr("rank 1's model has 4 parameters of 40 elements"));
  run([](comm::CommunicatorPtr comm) {
    Mlp model;
    EngineConfig config = engine_config(small_units(2, comm->rank() == 0 ? 2 : 3));
    config.seed = comm->rank();  // may well differ
    initialize(model, config, comm);
  });
  EXPECT_EQ(lines[0],
            "zero_optimization.stage is 2 on rank 0, but 3 on rank 1; expected the same on all ranks");
  EXPECT_EQ(lines[1], lines[0]);
}

// ------------------------------------------------------------------------------------------- refusals

TEST_P(EngineAt, RefusesWhatCannotBeMeantAndGoesOn) {
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
          refused(loss_of(*engine, step), "in evaluation mode: call train() first");
          engine->train();
        }
        engine->backward(loss_of(*engine, step));
        refused(loss_of(*engine, step), "call step() after the last backward()");
        engine->step();
      }
      Tensors weights;
      for (const char* name : {"fc1.weight", "fc3.bias"}) weights[name] = engine->full_parameter(name);
      return weights;
    };
    EXPECT_TRUE(bit_equal(train(true), train(false)));
  });
}

TEST_P(EngineAt, LossBackwardInPlaceOfEngineBackwardIsAnErrorNotSilence) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(1, GetParam()), comm);
    for (int step = 0; step < 2; ++step) {
      loss_of(*engine, step).backward();
      EXPECT_THAT(error_of([&] { engine->step(); }),
                  HasSubstr("fc1.weight has a gradient that did not come from engine->backward(loss)"));
      EXPECT_THAT(error_of([&] { engine->backward(loss_of(*engine, step)); }),
                  HasSubstr("model->zero_grad()"));
      engine->module().zero_grad();
      engine->backward(loss_of(*engine, step));
      engine->step();
      EXPECT_EQ(engine->global_steps(), step + 1);
    }
    // Gradients of something else, taken without touching .grad, are nobody's business.
    const at::Tensor x = randn({2, 7}, 5).set_requires_grad(true);
    const at::Tensor loss = engine->forward(x, randn({2, 3}, 6));
    EXPECT_TRUE(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0].defined());
    engine->backward(loss);
    engine->step();
  });
}

TEST_P(EngineAt, AForwardThatThrowsCanBeRepeated) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const auto train = [&](bool with_errors) {
      auto engine = mlp_engine(small_units(1, GetParam()), comm);
      for (int step = 0; step < 4; ++step) {
        if (with_errors) {
          EXPECT_ANY_THROW(engine->forward(randn({2, 7}, step), randn({2, 2}, step)));  // fails at the loss
        }
        engine->backward(loss_of(*engine, step));
        engine->step();
      }
      return engine->full_parameter("fc2.weight");
    };
    EXPECT_TRUE(at::equal(train(true), train(false)));
  });
}

TEST_P(EngineAt, AFailedBackwardIsNotForgotten) {
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(small_units(1, GetParam()), comm);
    engine->backward(loss_of(*engine, 0));
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

TEST_P(EngineAt, ARankThatLeavesTheOthersInBackwardMakesThemFailNotHang) {
  std::string survivor;
  const std::string first = error_of([&] {
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      auto engine = mlp_engine(small_units(2, GetParam()), comm);
      for (int step = 0; step < 3; ++step) {
        if (step == 2 && comm->rank() == 1) throw DataError("data/train: truncated");
        try {
          engine->backward(loss_of(*engine, step));
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

// -------------------------------------------------------------------------------- kinds of models

TEST_P(EngineAt, EngineForwardAndTheModelsOwnAreTheSame) {
  Tensors weights[2];
  for (const bool through_engine : {false, true})
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      auto engine = mlp_engine(small_units(2, GetParam()), comm);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = randn({2, 7}, 10 * step + comm->rank()),
                         y = randn({2, 3}, 20 * step + comm->rank());
        engine->backward(through_engine ? engine->forward(x, y) : engine->module().forward(x, y));
        engine->step();
      }
      for (const char* name : {"fc1.weight", "norm.bias"}) {
        const at::Tensor value = engine->full_parameter(name);
        if (comm->rank() == 0) weights[through_engine][name] = value;
      }
    });
  EXPECT_TRUE(bit_equal(weights[0], weights[1]));
}

TEST_P(EngineAt, Sequential) {
  torch::nn::Sequential plain(torch::nn::Linear(7, 9), torch::nn::Linear(9, 3));
  fill_parameters(*plain, 1);
  const at::Tensor x = randn({2, 7}, 1);
  const at::Tensor expected = plain->forward(x);
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    torch::nn::Sequential model(torch::nn::Linear(7, 9), torch::nn::Linear(9, 3));
    fill_parameters(*model, 1);
    auto engine = initialize(model, engine_config(small_units(2, GetParam())), comm);
    EXPECT_TRUE(at::equal(engine->forward(x), expected));
  });
}

torch::jit::Module script_module() {
  torch::jit::Module model("Net");
  const auto trainable = [](at::IntArrayRef sizes, uint64_t seed) {
    return randn(sizes, seed).set_requires_grad(true);
  };
  model.register_parameter("w1", trainable({13, 7}, 1), false);
  model.register_parameter("b1", trainable({13}, 2), false);
  model.register_parameter("w2", trainable({3, 13}, 3), false);
  model.register_buffer("offset", at::ones({3}));
  model.register_attribute("training", c10::BoolType::get(), true);
  model.define(R"(
    def forward(self, x, y):
        h = torch.tanh(torch.linear(x, self.w1, self.b1))
        d = torch.linear(h, self.w2) + self.offset - y
        return (d * d).mean()
  )");
  return model;
}

TEST_P(EngineAt, TorchScript) {
  const at::Tensor x = randn({8, 7}, 1), y = randn({8, 3}, 2);
  torch::jit::Module plain = script_module();
  std::vector<double> expected;
  for (int step = 0; step < 5; ++step) {
    const at::Tensor loss = plain.forward({x, y}).toTensor();
    expected.push_back(loss.item<double>());
    loss.backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : plain.parameters()) {
      parameter.sub_(parameter.grad(), 0.1);
      parameter.mutable_grad().reset();
    }
  }
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(2, GetParam());
    c.micro_batch = 4;
    EngineConfig config = engine_config(c);
    std::get<SGDOptions>(config.optimizer.options) = {.lr = 0.1};
    torch::jit::Module model = script_module();
    auto engine = initialize(model, config, comm);
    for (int step = 0; step < 5; ++step) {
      const at::Tensor mine = x.narrow(0, 4 * comm->rank(), 4), target = y.narrow(0, 4 * comm->rank(), 4);
      const c10::IValue loss = step % 2 == 0 ? engine->forward(mine, target)
                                             : engine->forward(std::vector<c10::IValue>{mine, target});
      engine->backward(loss.toTensor());
      engine->step();
    }
    EXPECT_NEAR(engine->forward(x, y).toTensor().item<double>(),
                plain.forward({x, y}).toTensor().item<double>(), 1e-5);
    EXPECT_LT(expected.back(), expected.front());
    EXPECT_TRUE(at::allclose(engine->full_parameter("w1"), plain.attr("w1").toTensor(), 1e-5, 1e-6));
    engine->eval();
    EXPECT_FALSE(model.is_training()) << "the engine's module is the caller's";
    engine->train();
    EXPECT_TRUE(model.is_training());
  });
}

}  // namespace
}  // namespace tessera::testing
