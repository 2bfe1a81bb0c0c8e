// What an exception in a forward, in backward, or a checkpoint loaded in the middle of a step leaves: an
// engine that trains on, as if the step had not been begun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <stdexcept>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "tests/engine/checkpoint/checkpoint_testing.h"
#include "zero/gathered_parameters.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

enum class Fails { kForward, kBackward, kBackwardElsewhere, kNothing };
enum class Then { kDrop, kZeroGrad, kLoad };

struct Failure {
  Fails fails = Fails::kNothing;
  int micro_step = 0;
  Then then = Then::kDrop;
};

using MlpEngine = TypedEngine<MlpImpl>;

Case case_of(int world, int stage, int accumulation) {
  Case c = small_units(world, stage);
  c.accumulation = accumulation;
  c.optimizer = "AdamW";
  c.config.checkpoint.fsync = false;
  return c;
}

at::Tensor micro_loss(MlpEngine& engine, const Case& c, int step, int micro) {
  return mlp_loss(engine.module(), step, first_sample(c, micro, engine.rank()), c.micro_batch);
}

/// A whole step.
void train(MlpEngine& engine, const Case& c, int step) {
  for (int micro = 0; micro < c.accumulation; ++micro) {
    engine.backward(micro_loss(engine, c, step, micro));
    engine.step();
  }
}

/// A step that fails in a micro-step, on all ranks.
void fail(MlpEngine& engine, const Case& c, const Failure& failure) {
  for (int micro = 0; micro < failure.micro_step; ++micro) {
    engine.backward(micro_loss(engine, c, 7, micro));
    engine.step();
  }
  if (failure.fails == Fails::kForward) {
    EXPECT_ANY_THROW(engine.forward(randn({2, 7}, 5), randn({2, 2}, 5)));  // it fails at the loss
  }
  if (failure.fails == Fails::kForward || failure.fails == Fails::kNothing) return;
  // Ranks differ in how far they come, where parameters are not gathered in backward.
  const bool early = failure.fails == Fails::kBackwardElsewhere && engine.rank() == 1;
  const at::Tensor& weight = early ? engine.module().fc3->weight : engine.module().fc1->weight;
  const auto hook = weight.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the hook's own trouble"); });
  EXPECT_THROW(engine.backward(micro_loss(engine, c, 7, failure.micro_step)), std::runtime_error);
  weight.remove_hook(hook);
  EXPECT_TRUE(engine.has_failed());
  EXPECT_THAT(error_of([&] { engine.step(); }), HasSubstr("the hook's own trouble"));
}

Tensors weights_after(comm::CommunicatorPtr comm, const Case& c, const std::optional<Failure>& failure,
                      const std::string& folder) {
  auto engine = mlp_engine(c, std::move(comm));
  train(*engine, c, 0);
  train(*engine, c, 1);
  if (failure) {
    if (failure->then == Then::kLoad) engine->save_checkpoint(folder);
    for (int repeated = 0; repeated < 2; ++repeated) {
      fail(*engine, c, *failure);
      if (failure->then == Then::kDrop) {
        engine->drop_gradients();
      } else if (failure->then == Then::kZeroGrad) {
        engine->zero_grad();
      } else {
        engine->load_checkpoint(folder);
      }
      EXPECT_FALSE(engine->has_failed());
      EXPECT_EQ(engine->global_steps(), 2);
    }
  }
  for (int step = 2; step < 4; ++step) train(*engine, c, step);
  Tensors weights;
  for (const char* name : {"fc1.weight", "fc2.weight", "fc3.bias"})
    weights[name] = engine->full_parameter(name);
  return weights;
}

class FailedStep : public ::testing::TestWithParam<int> {};  // stage
INSTANTIATE_TEST_SUITE_P(Stages, FailedStep, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

void expect_as_if_not_begun(int stage, int world, const std::vector<Fails>& kinds) {
  for (const int accumulation : {1, 3}) {
    const Case c = case_of(world, stage, accumulation);
    const TestFolder folder("failed_step");
    on_ranks(world, [&](comm::CommunicatorPtr comm) {
      const Tensors expected = weights_after(comm, c, std::nullopt, "");
      for (const Fails fails : kinds)
        for (const Then then : {Then::kDrop, Then::kZeroGrad, Then::kLoad}) {
          const bool has_failed = fails == Fails::kBackward || fails == Fails::kBackwardElsewhere;
          if (then == Then::kZeroGrad && !has_failed) continue;  // it keeps what a step() has left
          for (int micro = accumulation - 1; micro >= 0; micro -= 2)
            EXPECT_TRUE(
                bit_equal(weights_after(comm, c, Failure{fails, micro, then}, folder.string()), expected))
                << "accumulation " << accumulation << " fails " << static_cast<int>(fails) << " then "
                << static_cast<int>(then) << " at " << micro;
        }
    });
  }
}

TEST_P(FailedStep, IsAsIfNotBegun) {
  expect_as_if_not_begun(GetParam(), 1, {Fails::kBackward});
  expect_as_if_not_begun(GetParam(), 2, {Fails::kForward, Fails::kBackward, Fails::kNothing});
}

TEST_P(FailedStep, AlsoWhereRanksHaveComeToDifferentPlaces) {
  // Where parameters are gathered in backward, the rank that fails later waits for a gather of the other.
  if (GetParam() == 3 && !in_shared_memory()) return;
  expect_as_if_not_begun(GetParam(), 2, {Fails::kBackwardElsewhere});
}

TEST_P(FailedStep, AlsoInTheFirstStep) {
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const Case c = case_of(2, GetParam(), 1);
    const auto run = [&](bool fails) {
      auto engine = mlp_engine(c, comm);
      if (fails) {
        fail(*engine, c, {.fails = Fails::kBackward});
        engine->drop_gradients();
      }
      for (int step = 0; step < 3; ++step) train(*engine, c, step);
      return engine->full_parameter("fc2.weight");
    };
    EXPECT_TRUE(at::equal(run(true), run(false)));
  });
}

/// Writes a parameter on rank 0, in a GatheredParameters that an exception leaves on all ranks.
void write_and_throw(MlpEngine& engine) {
  EXPECT_EQ(error_of([&] {
              const zero::GatheredParameters gathered(engine.sharded_model(), {"fc2.weight"}, 0);
              const at::NoGradGuard no_grad;
              if (engine.rank() == 0) engine.module().fc2->weight.fill_(7);
              throw Error("changed my mind");
            }),
            "changed my mind");
  if (engine.rank() == 0) {
    EXPECT_THAT(error_of([&] { engine.step(); }),
                AllOf(HasSubstr("parameter fc2.weight was written"),
                      HasSubstr("a GatheredParameters that was left by an exception")));
  }
}

TEST_P(FailedStep, LoadingRepairsWhatAnExceptionInAGatheredParametersHasLeft) {
  const TestFolder folder("failed_write");
  const Case c = case_of(2, GetParam(), 1);
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(c, comm);
    train(*engine, c, 0);
    engine->save_checkpoint(folder.string(), "tag");
  });
  checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
  options.directory = folder.string();
  options.tag = "tag";
  options.output = folder / "model.safetensors";
  checkpoint::convert_checkpoint(options);
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto weights_after = [&](const std::function<void(MlpEngine&)>& load) {
      auto engine = mlp_engine(c, comm);
      train(*engine, c, 5);
      write_and_throw(*engine);
      load(*engine);
      Tensors weights;
      for (const bool more : {false, true}) {
        if (more) train(*engine, c, 1);
        for (const char* name : {"fc1.weight", "fc2.weight", "fc3.bias"})
          weights[str(name, more ? " then" : "")] = engine->full_parameter(name);
      }
      return weights;
    };
    const Tensors whole = weights_after([&](MlpEngine& engine) { engine.load_checkpoint(folder.string()); });
    auto plain = mlp_engine(c, comm);
    train(*plain, c, 0);
    EXPECT_TRUE(at::equal(whole.at("fc2.weight"), plain->full_parameter("fc2.weight")));
    train(*plain, c, 1);
    EXPECT_TRUE(at::equal(whole.at("fc2.weight then"), plain->full_parameter("fc2.weight")));
    const auto load_alone = [&](MlpEngine& engine) {
      engine.load_checkpoint(folder.string(), "", {.load_module_only = true});
    };
    const Tensors alone = weights_after(load_alone);
    EXPECT_TRUE(at::equal(alone.at("fc2.weight"), whole.at("fc2.weight")));
    const Tensors weights =
        weights_after([&](MlpEngine& engine) { engine.load_weights(folder / "model.safetensors"); });
    EXPECT_TRUE(bit_equal(weights, alone));
  });
}

TEST_P(FailedStep, WhatOneRankAloneHasWrittenIsAnErrorOfAllRanks) {
  const TestFolder folder("failed_write_partial");
  const Case c = case_of(2, GetParam(), 1);
  on_ranks(2, [&](comm::CommunicatorPtr comm) {
    auto engine = mlp_engine(c, comm);
    train(*engine, c, 0);
    engine->save_checkpoint(folder.string(), "whole");
    write_and_throw(*engine);
    const auto expect_refused = [&](const std::function<void()>& call) {
      EXPECT_THAT(error_of(call), AllOf(HasSubstr("rank 0: parameter fc2.weight was written"),
                                        HasSubstr("a GatheredParameters that was left by an exception")));
    };
    expect_refused([&] { engine->load_checkpoint(folder.string(), "whole", {.strict = false}); });
    expect_refused([&] { engine->load_weights(folder / "any", {.ignore_missing = {"fc1.*"}}); });
    expect_refused([&] { engine->save_checkpoint(folder.string(), "other"); });
    engine->load_checkpoint(folder.string(), "whole");
    train(*engine, c, 1);
  });
}

TEST_P(FailedStep, ACheckpointThatCannotBeLoadedPutsNothingRight) {
  const TestFolder folder("failed_step_missing");
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    const Case c = case_of(1, GetParam(), 1);
    auto engine = mlp_engine(c, comm);
    train(*engine, c, 0);
    fail(*engine, c, {.fails = Fails::kBackward});
    EXPECT_THAT(error_of([&] { engine->load_checkpoint(folder.string()); }), HasSubstr(folder.string()));
    EXPECT_TRUE(engine->has_failed());
    EXPECT_THAT(error_of([&] { engine->step(); }), HasSubstr("the hook's own trouble"));
  });
}

}  // namespace
}  // namespace tessera::testing
