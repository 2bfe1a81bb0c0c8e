// FlopCounter against formulas; StepProfiler: which step is counted, and what a trace has.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/files/temporary_folder.h"
#include "engine/checkpointing.h"
#include "engine/profile/flop_counter.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(); }

Flops count(const std::function<at::Tensor()>& loss) {
  const FlopCounter counter;
  torch::autograd::backward({loss()}, {});
  return counter.flops();
}

TEST(FlopCounter, ProductsOfMatrices) {
  // (5, 7) x (7, 3): 5 * 7 * 3 multiplications and as many additions; backward has one such product for each.
  EXPECT_EQ(count([] { return leaf({5, 7}).mm(leaf({7, 3})).sum(); }), (Flops{210, 420}));
  EXPECT_EQ(count([] { return at::linear(leaf({5, 7}), leaf({3, 7}), leaf({3})).sum(); }), (Flops{210, 420}));
  EXPECT_EQ(count([] { return at::matmul(leaf({2, 5, 7}), leaf({2, 7, 3})).sum(); }), (Flops{420, 840}));
  EXPECT_EQ(count([] { return at::baddbmm(leaf({2, 5, 3}), leaf({2, 5, 7}), leaf({2, 7, 3})).sum(); }),
            (Flops{420, 840}));
  EXPECT_EQ(count([] { return at::linear(at::randn({5, 7}), leaf({3, 7})).sum(); }), (Flops{210, 210}))
      << "inputs that need no gradient";
}

TEST(FlopCounter, Convolutions) {
  // 4 filters of 3 x 3 over 2 channels at 6 x 5 places, of 2 images.
  const int64_t flops = int64_t{2} * 2 * 4 * 2 * 9 * 30;
  EXPECT_EQ(count([] { return at::conv2d(leaf({2, 2, 8, 7}), leaf({4, 2, 3, 3})).sum(); }),
            (Flops{flops, 2 * flops}));
  // Padding 1, stride 2: 4 x 4 places; two groups, each of one channel.
  const int64_t grouped = int64_t{2} * 2 * 4 * 1 * 9 * 16;
  EXPECT_EQ(count([] { return at::conv2d(leaf({2, 2, 8, 7}), leaf({4, 1, 3, 3}), {}, 2, 1, 1, 2).sum(); }),
            (Flops{grouped, 2 * grouped}));
  // Transposed: each of 8 x 7 inputs with 2 channels meets 4 filters.
  const int64_t transposed = int64_t{2} * 2 * 2 * 4 * 9 * 56;
  EXPECT_EQ(count([] { return at::conv_transpose2d(leaf({2, 2, 8, 7}), leaf({2, 4, 3, 3})).sum(); }),
            (Flops{transposed, 2 * transposed}));
  constexpr std::array<int64_t, 1> one = {1}, none = {0}, two = {2};
  // Dilation 2: a filter of 3 reaches over 5 of 10.
  EXPECT_EQ(count([&] { return at::conv1d(leaf({1, 3, 10}), leaf({2, 3, 3}), {}, one, none, two).sum(); }),
            (Flops{2 * 6 * 2 * 3 * 3, 2 * 2 * 6 * 2 * 3 * 3}));
}

TEST(FlopCounter, Attention) {
  // 3 heads, 6 queries, 5 keys of 8, values of 8: the scores and their product with the values.
  const int64_t flops = 2 * (int64_t{2} * 3 * 6 * 5 * 8) * 2;
  const auto loss = [] {
    return at::scaled_dot_product_attention(leaf({2, 3, 6, 8}), leaf({2, 3, 5, 8}), leaf({2, 3, 5, 8})).sum();
  };
  EXPECT_EQ(count(loss), (Flops{flops, 2 * flops})) << "the kernel that repeats the scores in backward";
}

TEST(FlopCounter, WithoutAGraphNothingIsCounted) {
  const FlopCounter counter;
  {
    const at::NoGradGuard no_grad;
    leaf({5, 7}).mm(leaf({7, 3}));
  }
  EXPECT_EQ(counter.flops(), Flops{});
}

std::unique_ptr<TypedEngine<MlpImpl>> profiled(const EngineConfig& config, comm::CommunicatorPtr comm) {
  Mlp model;
  fill_parameters(*model, 1);
  return initialize(model, config, std::move(comm));
}

void train_step(TypedEngine<MlpImpl>& engine, int step) {
  for (int64_t micro = 0; micro < engine.config().gradient_accumulation_steps; ++micro) {
    engine.backward(engine.forward(randn({2, 7}, 100 + step), randn({2, 3}, 200 + step)));
    engine.step();
  }
}

// The MLP's layers, of 2 samples: (7, in) -> ... every layer's product forward, and for weights and inputs
// backward.
TEST(StepProfiler, CountsAWholeStepAtEveryStageAndPolicy) {
  int64_t expected = 0;
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* policy : {"none", "cheap", "block"})
      on_ranks(1, [&](comm::CommunicatorPtr comm) {
        Case c = small_units(1, stage);
        c.accumulation = 2;
        EngineConfig config = engine_config(c);
        config.activations.policy = policy;
        config.flops_profiler = {.enabled = true, .profile_step = 2};
        const auto engine = profiled(config, comm);
        train_step(*engine, 0);
        EXPECT_FALSE(engine->flops()) << "step 2 was asked for";
        engine->eval();
        {
          const at::NoGradGuard no_grad;
          engine->forward(randn({2, 7}, 1), randn({2, 3}, 2));
        }
        engine->train();
        train_step(*engine, 1);
        ASSERT_TRUE(engine->flops());
        if (expected == 0) {
          int64_t weights = 0;
          for (const auto& parameter : engine->module().parameters())
            if (parameter.dim() == 2) weights += parameter.numel();
          EXPECT_EQ(engine->flops()->forward, 2 * 2 * 2 * weights) << "two micro-steps of two samples";
          expected = engine->flops()->total();
        }
        EXPECT_EQ(engine->flops()->total(), expected) << "stage " << stage << ", " << policy;
        train_step(*engine, 2);
        EXPECT_EQ(engine->flops()->total(), expected) << "one step is counted";
      });
}

TEST(StepProfiler, ATraceHasTheOperatorsAndScopesOfItsSteps) {
  const TemporaryFolder folder("tessera_trace");
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    EngineConfig config = engine_config(small_units(1, 3));
    config.profiler = {.steps = 2, .first_step = 2, .path = (folder.path() / "traces").string()};
    const auto engine = profiled(config, comm);
    const std::filesystem::path file = folder.path() / "traces" / "rank_00000.pt.trace.json";
    for (int step = 0; step < 4; ++step) {
      EXPECT_EQ(std::filesystem::exists(file), step > 2) << step;
      train_step(*engine, step);
    }
    std::ifstream text(file);
    const nlohmann::json trace = nlohmann::json::parse(text);
    std::map<std::string, int> events;
    for (const auto& event : trace.at("traceEvents"))
      if (event.contains("name") && event.value("ph", "") == "X") ++events[event["name"].get<std::string>()];
    for (const char* scope : {"tessera.forward", "tessera.backward", "tessera.step"})
      EXPECT_EQ(events[scope], 2) << scope;
    EXPECT_GT(events["aten::addmm"], 0);

    engine->save_checkpoint((folder.path() / "saved").string());
    config.profiler = {.steps = 2, .first_step = 1, .path = (folder.path() / "resumed").string()};
    const auto resumed = profiled(config, comm);
    resumed->load_checkpoint((folder.path() / "saved").string());
    for (const int step : {4, 5}) {
      EXPECT_FALSE(std::filesystem::exists(folder.path() / "resumed"))
          << "two steps, whatever was done before";
      train_step(*resumed, step);
    }
    EXPECT_TRUE(std::filesystem::exists(folder.path() / "resumed"));
  });
}

TEST(StepProfiler, AFolderThatCannotBeMadeIsAWarning) {
  const TemporaryFolder folder("tessera_trace");
  std::ofstream(folder.path() / "file") << "no folder";
  on_ranks(1, [&](comm::CommunicatorPtr comm) {
    EngineConfig config = engine_config(small_units(1, 0));
    config.profiler = {.steps = 1, .first_step = 1, .path = (folder.path() / "file").string()};
    const auto engine = profiled(config, comm);
    train_step(*engine, 0);
    train_step(*engine, 1);
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

}  // namespace
}  // namespace tessera::testing
