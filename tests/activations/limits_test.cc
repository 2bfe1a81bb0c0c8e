// What recomputation must refuse, and what it must leave alone.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "activations/checkpointing.h"
#include "comm/init/self.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/activations/models.h"
#include "tests/support/errors.h"
#include "tests/support/log_file.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

/// One linear layer, and what a test does with its result.
struct OneLayerImpl : torch::nn::Module {
  OneLayerImpl() { layer = register_module("layer", torch::nn::Linear(kDim, kDim)); }
  at::Tensor forward(const at::Tensor& x) { return then(layer->forward(x)); }
  torch::nn::Linear layer{nullptr};
  std::function<at::Tensor(const at::Tensor&)> then;
};
TORCH_MODULE(OneLayer);

class Limits : public ::testing::Test {
 protected:
  std::unique_ptr<TypedEngine<OneLayerImpl>> make_engine(const std::string& policy = "cheap") {
    Case c;
    c.micro_batch = 4;
    c.config.activations.policy = policy;
    if (policy == "offload") c.config.activations.nvme_path = folder.path().string();
    fill_parameters(*model, 1);
    return initialize(model, engine_config(c),
                      std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)));
  }
  TemporaryFolder folder{"activations"};
  OneLayer model;
  static void expect_at_work(const Engine& engine) {
    if (engine.activations() == nullptr) return;
    const activations::Counts counts = engine.activations()->counts();
    EXPECT_GT(counts.work.num_calls + counts.num_offloaded, 0);
  }
  using Pass = std::function<void(TypedEngine<OneLayerImpl>&)>;
  /// Under each policy the weight's gradient has the bits of policy "none".
  void expect_the_gradient_of_none(std::vector<const char*> policies, const Pass& pass) {
    at::Tensor expected;
    policies.insert(policies.begin(), "none");
    for (const char* policy : policies) {
      const auto engine = make_engine(policy);
      pass(*engine);
      const at::Tensor gradient = engine->full_gradient("layer.weight");
      if (!expected.defined()) expected = gradient;
      EXPECT_TRUE(at::equal(gradient, expected)) << policy;
      expect_at_work(*engine);
    }
  }
  void expect_the_gradient_of_none(const std::vector<const char*>& policies) {
    expect_the_gradient_of_none(policies, [this](auto& engine) { engine.backward(engine.forward(x).sum()); });
  }
  at::Tensor x = randn({64, kDim}, 1), mask = randn({64, kDim}, 2);
};

TEST_F(Limits, ASavedTensorThatIsWrittenIsRefusedAsWithoutHooks) {
  at::Tensor y;
  model->then = [&](const at::Tensor& h) { return y = at::tanh(h); };
  for (const char* policy : {"none", "cheap", "block", "offload"}) {
    const auto engine = make_engine(policy);
    const at::Tensor loss = engine->forward(x).sum();
    y.detach().add_(1);
    EXPECT_NE(error_of([&] { engine->backward(loss); }), "") << policy;
  }
}

TEST_F(Limits, AnInputWrittenAfterwardsIsCopiedBefore) {
  // The product saves gelu's result.
  model->then = [&](const at::Tensor& h) { return h * at::gelu(mask + 1); };
  const auto written_by = [&](const std::function<void()>& write) {
    return [&, write](TypedEngine<OneLayerImpl>& engine) {
      mask = randn({64, kDim}, 2);
      const at::Tensor loss = engine.forward(x).sum();
      write();
      engine.backward(loss);
    };
  };
  expect_the_gradient_of_none({"cheap", "offload"}, written_by([&] { mask.zero_(); }));
  const auto on_another_thread = [&] { std::thread([&] { mask.zero_(); }).join(); };
  expect_the_gradient_of_none({"cheap", "block"}, written_by(on_another_thread));
}

// Every forward compares what comes from outside: no operator and no version tells of such a write.
TEST_F(Limits, AnInputWrittenWithoutAnOperatorIsRefused) {
  model->then = [&](const at::Tensor& h) { return h * at::gelu(mask + 1); };
  const auto engine = make_engine();
  engine->backward(engine->forward(x).sum());
  engine->step();
  const at::Tensor loss = engine->forward(x).sum();
  mask.data_ptr<float>()[5] += 1;
  EXPECT_THAT(error_of([&] { engine->backward(loss); }),
              HasSubstr("aten::add is run again in backward, and a tensor that it reads differs: other "
                        "values in the float 64x64"));
}

// A kernel of an extension fills what at::empty() or at::zeros() has made, or writes what an operator made.
TEST_F(Limits, MemoryThatAKernelFillsIsKeptAndWhatItChangesIsFound) {
  const auto tripled = [](const at::Tensor& from, at::Tensor to) {
    const float* const read = from.const_data_ptr<float>();
    float* const written = to.data_ptr<float>();
    for (int64_t i = 0; i < from.numel(); ++i) written[i] = 3 * read[i];
    return to;
  };
  model->then = [&](const at::Tensor& h) {
    return h * at::gelu(mask + 1) * tripled(mask, at::empty_like(mask)) *
           tripled(mask, at::zeros({64, kDim})).sin();
  };
  expect_the_gradient_of_none({"cheap", "block"});
  model->then = [&](const at::Tensor& h) { return h * tripled(mask, mask.clone()); };
  const auto engine = make_engine();
  EXPECT_THAT(error_of([&] { engine->backward(engine->forward(x).sum()); }),
              HasSubstr("{\"keep\": [\"aten::clone\"]}"));
}

TEST_F(Limits, EvaluationAndNoGradRecordNothing) {
  model->then = [](const at::Tensor& h) { return at::gelu(h) * 2; };
  const auto engine = make_engine();
  engine->eval();
  engine->forward(x);
  EXPECT_FALSE(activations::records_on_this_thread());
  engine->train();
  {
    const at::NoGradGuard no_grad;
    model->forward(x);
    EXPECT_FALSE(activations::records_on_this_thread());
  }
  const at::Tensor loss = model->forward(x).sum();
  EXPECT_TRUE(activations::records_on_this_thread());
  engine->backward(loss);
  EXPECT_FALSE(activations::records_on_this_thread());
}

TEST_F(Limits, AnOperatorThatFailsLeavesTheNextForwardUsable) {
  bool fails = false;
  model->then = [&](const at::Tensor& h) {
    const at::Tensor y = at::gelu(at::gelu(h) * 2);
    if (fails) at::matmul(y, at::zeros({3, 3}));
    return y * y;
  };
  expect_the_gradient_of_none({"cheap"}, [&](auto& engine) {
    fails = true;
    EXPECT_THROW(engine.forward(x), std::exception);
    fails = false;
    engine.backward(engine.forward(x).sum());
  });
}

TEST_F(Limits, AnOperatorMayGiveATensorOtherMemory) {
  model->then = [](const at::Tensor& h) {
    const at::Tensor factor = at::ones_like(h).detach();
    for (int i = 0; i < 4; ++i) factor.set_(at::full_like(h, 0.5));
    return at::gelu(at::gelu(h) * factor).square();
  };
  expect_the_gradient_of_none({"cheap"});
}

TEST_F(Limits, BackwardOfBackwardHasTheSameBits) {
  // A gradient penalty: the forward runs a backward whose graph is kept.
  model->then = [](const at::Tensor& h) {
    const at::Tensor energy = (at::gelu(at::gelu(h) * 2) * 3).sum();
    const auto gradient =
        torch::autograd::grad({energy}, {h}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return gradient[0].square() + energy;
  };
  expect_the_gradient_of_none({"cheap", "offload"},
                              [&](auto& engine) { engine.backward(engine.forward(x).mean()); });
}

TEST_F(Limits, BackwardLeavesTheGeneratorAsItWas) {
  // native_dropout draws from the default generator: it has no argument for another.
  model->then = [](const at::Tensor& h) {
    return at::gelu(std::get<0>(at::native_dropout(at::gelu(h * 2), 0.5, true))) * 2;
  };
  std::vector<at::Tensor> drawn;
  expect_the_gradient_of_none({"cheap", "block"}, [&](auto& engine) {
    at::manual_seed(1);
    const at::Tensor loss = engine.forward(x).sum();
    static_cast<void>(at::rand({5}));  // moves the generator on
    engine.backward(loss);
    drawn.push_back(at::rand({8}));
    EXPECT_TRUE(at::equal(drawn.back(), drawn.front()));
  });
}

TEST_F(Limits, AnInPlaceOperatorIsRepeatedOnACopyOfWhatOthersNeed) {
  model->then = [&](const at::Tensor& h) {
    at::Tensor input = mask.clone();
    const at::Tensor before = at::gelu(input + 1);
    input.mul_(0.5);
    return h * at::gelu(before + input);  // made again: the product, then what was there before it
  };
  expect_the_gradient_of_none({"cheap"});
}

TEST_F(Limits, ANumberOfBlocksUnderAnotherPolicyIsWarnedOf) {
  LogFile log;
  Case c;
  c.config.activations.policy = "cheap";
  c.config.activations.number_checkpoints = 1;
  initialize(model, engine_config(c), std::make_shared<comm::SelfCommunicator>(std::chrono::minutes(1)),
             {.log = log.logger()});
  EXPECT_THAT(log.text(), HasSubstr("number_checkpoints has no effect under the policy \"cheap\""));
}

TEST_F(Limits, TheGraphMayOutliveTheEngine) {
  model->then = [](const at::Tensor& h) { return at::gelu(h) * at::gelu(at::gelu(h)); };
  auto engine = make_engine();
  const at::Tensor loss = engine->forward(x).sum();
  engine.reset();
  EXPECT_TRUE(loss.defined());
}

}  // namespace
}  // namespace tessera::testing
