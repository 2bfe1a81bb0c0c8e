// Ranks with different models and equal parameters: an error on all of them that says what differs.
#include "zero/model/model_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>

#include "tests/zero/zero_testing.h"
#include "zero/model/model_view.h"

namespace tessera::zero::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Make = std::function<ModelView(int rank)>;

/// By rank of three, of which the last has another model: what initialize() throws.
std::vector<std::string> errors_of(const Make& make) {
  std::vector<std::string> errors(3);
  run_ranks(3, [&](comm::CommunicatorPtr comm) {
    const ModelView view = make(comm->rank());
    errors[static_cast<size_t>(comm->rank())] =
        tessera::testing::error_of<CommError>([&] { Rig rig(view, comm, 1); });
  });
  return errors;
}

void expect_noticed(const Make& make, const std::vector<std::string>& words) {
  for (const std::string& error : errors_of(make)) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 2's model "), HasSubstr("all ranks must build the same model")));
    for (const std::string& word : words) EXPECT_THAT(error, HasSubstr(word));
    EXPECT_EQ(error.find('\n'), error.npos) << error;
  }
}

TEST(ModelProgram, OfOtherModulesIsNoticed) {
  std::vector<torch::nn::Sequential> models(3, nullptr);  // they outlive their views
  const auto with = [&](auto usual, auto other) {
    return [&, usual, other](int rank) {
      torch::nn::Sequential& model = models[static_cast<size_t>(rank)];
      model = torch::nn::Sequential();
      model->push_back("fc", torch::nn::Linear(kWidth, kWidth));
      rank == 2 ? model->push_back("act", other()) : model->push_back("act", usual());
      return view_of(*model);
    };
  };
  const auto relu = [] { return torch::nn::ReLU(); };
  const auto dropout = [](double p) { return [p] { return torch::nn::Dropout(p); }; };
  for (const std::string& error : errors_of(with(relu, relu))) EXPECT_EQ(error, "");
  expect_noticed(with(relu, [] { return torch::nn::GELU(); }),
                 {" act", "torch::nn::GELU", "torch::nn::ReLU"});
  expect_noticed(with(dropout(0.1), dropout(0.5)), {" act", "p=0.5", "p=0.1"});
}

/// A scripted module with a function of its own, an attribute and a constant.
torch::jit::Module script(const std::string& activation, const std::string& rate, double scale) {
  torch::jit::Module inner("Inner");
  inner.register_parameter("weight", randn({kWidth, kWidth}, 5), /*is_buffer=*/false);
  inner.register_attribute("scale", c10::FloatType::get(), scale);
  inner.define("def activate(self, x):\n  return torch." + activation +
               "(x)\n"
               "def forward(self, x):\n  return self.activate(torch.mm(x, self.weight)) * self.scale\n");
  torch::jit::Module outer("Outer");
  outer.register_module("inner", inner);
  outer.define("def forward(self, x):\n  return torch.dropout(self.inner.forward(x), " + rate + ", True)\n");
  for (at::Tensor parameter : outer.parameters()) parameter.set_requires_grad(true);
  return outer;
}

TEST(ModelProgram, OfAnotherScriptIsNoticed) {
  const auto usual = [] { return script("relu", "0.1", 2); };
  const auto with = [&](const torch::jit::Module& other) {
    return [&, other](int rank) { return view_of(rank == 2 ? other : usual()); };
  };
  for (const std::string& error : errors_of(with(usual()))) EXPECT_EQ(error, "");
  expect_noticed(with(script("tanh", "0.1", 2)), {"inner.activate", "aten::tanh", "aten::relu"});
  expect_noticed(with(script("relu", "0.5", 2)), {" forward", "0.5", "0.1"});
  expect_noticed(with(script("relu", "0.1", 3)), {"inner.scale", "\"3.\"", "\"2.\""});
}

TEST(ModelProgram, NamesThatTorchScriptHasNumberedAreTheSame) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  const auto make = [&] {  // the second class of this name is ___torch_mangle_0
    torch::jit::Module module(c10::QualifiedName("__torch__.Net"), unit, /*shouldMangle=*/true);
    module.register_parameter("weight", at::ones({4}), /*is_buffer=*/false);
    module.define("def forward(self, x):\n  return x * self.weight\n");
    return module;
  };
  const torch::jit::Module first = make(), second = make();
  ASSERT_NE(first.type()->name()->qualifiedName(), second.type()->name()->qualifiedName());
  EXPECT_EQ(program_of(first), program_of(second));
  EXPECT_FALSE(program_of(first).empty());
}

}  // namespace
}  // namespace tessera::zero::testing
