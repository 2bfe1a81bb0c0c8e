// Engines of modules called directly and of TorchScript.
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

class ModelKinds : public ::testing::TestWithParam<int> {};  // stage
INSTANTIATE_TEST_SUITE_P(Stages, ModelKinds, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

TEST_P(ModelKinds, EngineForwardAndTheModelsOwnAreTheSame) {
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

TEST_P(ModelKinds, TorchScript) {
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
