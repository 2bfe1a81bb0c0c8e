// Which models can be sharded, TorchScript's among them, and what they look like afterwards.
#include "zero/model/model_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/nn/modules/conv.h>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct HolderImpl : torch::nn::Module {};

/// The error for a model whose only parameters are these.
std::string refusal(const std::vector<NamedTensor>& parameters) {
  ModelView view;
  view.parameters = parameters;
  try {
    list_parameters(view, DType::kFloat32);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(ModelView, RefusesByNameWhatCannotBeSharded) {
  EXPECT_EQ(refusal({{"fine", at::ones({3})}}), "");
  const auto trained = [](at::ScalarType dtype) { return at::ones({3}, dtype).set_requires_grad(true); };
  EXPECT_THAT(refusal({{"fine", at::ones({3})}, {"a.double", trained(at::kDouble)}}),
              AllOf(HasSubstr("a.double"), HasSubstr("Double")));
  EXPECT_THAT(refusal({{"a.complex", trained(at::kComplexFloat)}}), HasSubstr("a.complex"));
  for (const at::ScalarType dtype : {at::kDouble, at::kComplexFloat, at::kInt, at::kChar, at::kFloat8_e4m3fn})
    EXPECT_EQ(refusal({{"frozen", at::zeros({3}, dtype)}}), "") << dtype;
  EXPECT_THAT(refusal({{"a.bits", at::zeros({3}, at::kByte).view(at::ScalarType::Bits8)}}),
              AllOf(HasSubstr("a.bits"), HasSubstr("buffer")));
  EXPECT_THAT(refusal({{"a.sparse", at::eye(3).to_sparse()}}),
              AllOf(HasSubstr("a.sparse"), HasSubstr("dense")));
  EXPECT_THAT(refusal({{"a.expanded", at::ones({1, 3}).expand({4, 3})}}),
              AllOf(HasSubstr("a.expanded"), HasSubstr("contiguous")));
  EXPECT_THAT(refusal({{"a.strided", at::ones({8}).slice(0, 0, 8, 2)}}), HasSubstr("a.strided"));
  const at::Tensor memory = at::ones({10});
  EXPECT_THAT(refusal({{"a.left", memory.narrow(0, 0, 6)}, {"a.right", memory.narrow(0, 5, 5)}}),
              AllOf(HasSubstr("a.left"), HasSubstr("a.right"), HasSubstr("share memory")));
  EXPECT_THAT(refusal({{"a.one", memory}, {"a.other", memory.view({2, 5})}}), HasSubstr("share memory"));
  EXPECT_EQ(refusal({{"left", memory.narrow(0, 0, 5)}, {"right", memory.narrow(0, 5, 5)}}), "")
      << "side by side is fine";
  EXPECT_EQ(refusal({{"empty", memory.narrow(0, 0, 0)}, {"whole", memory}}), "");
}

TEST(ModelView, AModelWithoutParametersIsRefused) {
  const torch::nn::Module empty("empty");
  EXPECT_THAT(error_of([&] { Rig(empty, alone(), 0); }), HasSubstr("no parameters"));
}

TEST(ModelView, TiedParametersAppearOnce) {
  tessera::testing::Odds model;
  const ParameterList list = list_parameters(view_of(*model), DType::kBFloat16);
  const auto tied = std::find_if(list.specs.begin(), list.specs.end(),
                                 [](const ParameterSpec& spec) { return !spec.aliases.empty(); });
  ASSERT_NE(tied, list.specs.end());
  const std::vector<std::string> names{tied->name, tied->aliases.front()};
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("table.weight", "decoder_weight"));
  EXPECT_EQ(list.specs.size(), list.tensors.size());
  EXPECT_EQ(list.specs.size() + 1, model->named_parameters().size());
  EXPECT_EQ(tied->dtype, DType::kBFloat16);
  const auto frozen = std::find_if(list.specs.begin(), list.specs.end(),
                                   [](const ParameterSpec& spec) { return spec.name == "frozen.weight"; });
  EXPECT_FALSE(frozen->trainable);
  for (int stage : {0, 3}) {
    tessera::testing::Odds sharded;
    Rig rig(*sharded, alone(), stage);
    EXPECT_TRUE(at::equal(rig.sharded->full_parameter("decoder_weight"),
                          rig.sharded->full_parameter("table.weight")));
    EXPECT_EQ(sharded->decoder_weight.unsafeGetTensorImpl(), sharded->table->weight.unsafeGetTensorImpl())
        << "still one tensor";
  }
}

struct ConvImpl : torch::nn::Module {
  ConvImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3)));
    fill_parameters(*this, 1);
  }
  torch::nn::Conv2d conv{nullptr};
};
TORCH_MODULE(Conv);

TEST(ModelView, ChannelsLastIsStoredRowMajor) {
  Conv model, plain;
  {
    const at::NoGradGuard no_grad;
    model->conv->weight.set_data(model->conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  ASSERT_FALSE(model->conv->weight.is_contiguous());
  const at::Tensor x = randn({2, 3, 6, 6}, 3);
  const std::vector<at::Tensor> expected = plain_gradients(*plain, plain->conv->forward(x).square().sum());
  for (int stage : {0, 3}) {
    Conv again;
    again->conv->weight.set_data(model->conv->weight.detach().clone());
    ASSERT_FALSE(again->conv->weight.is_contiguous());
    Rig rig(*again, alone(), stage);
    EXPECT_TRUE(again->conv->weight.is_contiguous());
    EXPECT_TRUE(at::equal(rig.sharded->full_parameter("conv.weight"), plain->conv->weight));
    rig.backward(again->conv->forward(x.contiguous(at::MemoryFormat::ChannelsLast)).square().sum());
    EXPECT_LT(largest_difference(rig.gradients(), expected), 1e-3);
  }
}

torch::jit::Module script() {
  torch::jit::Module inner("inner");
  inner.register_parameter("weight", randn({kWidth, kWidth}, 5) * 0.3, /*is_buffer=*/false);
  inner.register_parameter("bias", randn({kWidth}, 6), false);
  inner.register_buffer("scale", at::full({1}, 2.0));
  inner.define(
      "def forward(self, x):\n  return torch.tanh(torch.addmm(self.bias, x, self.weight.t())) * "
      "self.scale\n");
  torch::jit::Module outer("outer");
  outer.register_module("inner", inner);
  outer.register_parameter("head", randn({kWidth, 3}, 7) * 0.3, false);
  outer.define(
      "def forward(self, x):\n  for i in range(2):\n    x = self.inner.forward(x)\n  return torch.mm(x, "
      "self.head)\n");
  for (at::Tensor parameter : outer.parameters()) parameter.set_requires_grad(true);
  return outer;
}

TEST(ModelView, TorchScriptTrainsTheSameAtStage3) {
  for (int world : {1, 2}) {
    std::vector<at::Tensor> expected;
    for (int stage : {0, 1, 2, 3}) {
      run_ranks(world, [&](comm::CommunicatorPtr comm) {
        torch::jit::Module model = script();
        Rig rig(view_of(model), comm, stage, [](ShardedModelOptions& options) {
          options.unit_numel = 64;
          options.residency.capacity_units = 1;
        });
        EXPECT_EQ(rig.sharded->layout().find("inner.weight") >= 0, true);
        if (stage == 3) {
          EXPECT_FALSE(torch::jit::tensorExprFuserEnabled()) << "it would read released units by raw pointer";
        }
        for (int step = 0; step < 4; ++step)  // past the profiling runs of the graph executor
          rig.step(model.forward({randn({3, kWidth}, 10 * step + comm->rank())}).toTensor().square().mean());
        const std::vector<at::Tensor> weights = rig.weights();
        if (comm->rank() != 0) return;
        if (stage == 0) expected = weights;
        EXPECT_TRUE(same_bits(weights, expected)) << "world " << world << " stage " << stage;
      });
    }
    std::vector<at::Tensor> initial;
    for (const at::Tensor& parameter : script().parameters()) initial.push_back(parameter);
    EXPECT_GT(largest_difference(expected, initial), 1e-3) << "it must have moved";
  }
}

/// Adds a torch.jit.fork, as the compiler writes it, to a block.
void add_fork(torch::jit::Block* block, torch::jit::Graph& graph) {
  torch::jit::Node* fork = graph.create(at::prim::fork, 1);
  auto forked = std::make_shared<torch::jit::Graph>();
  forked->registerOutput(forked->insertConstant(1));
  fork->g_(at::attr::Subgraph, forked);
  fork->output()->setType(at::FutureType::create(at::IntType::get()));
  fork->insertBefore(block->return_node());
}

TEST(ModelView, TorchScriptThatForksIsRefusedAtStage3) {
  torch::jit::Module in_submodule = script(), in_loop = script(), in_another_method = script();
  for (const torch::jit::Module& child : in_submodule.children())
    add_fork(child.get_method("forward").graph()->block(), *child.get_method("forward").graph());
  const auto graph = in_loop.get_method("forward").graph();
  for (torch::jit::Node* node : graph->nodes())
    if (node->kind() == at::prim::Loop) add_fork(node->blocks()[0], *graph);
  in_another_method.define("def loss(self, x):\n  return x\n");
  add_fork(in_another_method.get_method("loss").graph()->block(),
           *in_another_method.get_method("loss").graph());
  EXPECT_EQ(view_of(script()).forks_in, "");
  for (const torch::jit::Module& model : {in_submodule, in_loop, in_another_method}) {
    for (int stage : {0, 2, 3}) {
      const std::string error = error_of([&] { Rig(view_of(model), alone(), stage); });
      if (stage < 3) {
        EXPECT_EQ(error, "");
      } else {
        EXPECT_THAT(error, AllOf(HasSubstr("torch.jit.fork"), HasSubstr("stage 3"),
                                 HasSubstr(view_of(model).forks_in)));
      }
    }
  }
}

TEST(ModelView, AnUpdateBumpsVersionCounters) {
  Chain plain(2);
  const std::string expected = error_of([&] {
    const at::Tensor loss = plain->forward(randn({2, kWidth}, 1)).sum();
    {
      const at::NoGradGuard no_grad;
      plain->layers[1]->weight.add_(1);
    }
    loss.backward();
  });
  ASSERT_THAT(expected, HasSubstr("modified by an inplace operation"));
  for (int stage = 0; stage <= 3; ++stage) {
    Chain model(2);
    Rig rig(*model, alone(), stage);
    rig.backward(model->forward(randn({2, kWidth}, 1)).sum());
    const at::Tensor old = model->forward(randn({2, kWidth}, 1)).sum();
    const auto before = model->layers[1]->weight._version();
    rig.update();
    EXPECT_GT(model->layers[1]->weight._version(), before);
    EXPECT_THAT(error_of([&] { rig.backward(old); }), HasSubstr("modified by an inplace operation"))
        << "stage " << stage;
  }
}

struct BuffersImpl : torch::nn::Module {
  BuffersImpl(int rank) {
    weight = register_parameter("weight", at::ones({3}));
    whole = register_buffer("whole", at::full({2}, 5 + rank, at::kLong));
    flag = register_buffer("flag", at::full({2}, rank == 0, at::kBool));
    wave = register_buffer(
        "wave", at::full({2, 2}, c10::complex<float>(1, static_cast<float>(rank)), at::kComplexFloat));
    strided = register_buffer("strided", at::full({4, 3}, rank).t());
    scalar = register_buffer("scalar", at::full({}, 1.0 + rank));
  }
  at::Tensor weight, whole, flag, wave, strided, scalar;
};
TORCH_MODULE(Buffers);

TEST(ModelView, BuffersBecomeRankZeros) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Buffers model(comm->rank()), expected(0);
    Rig rig(*model, comm, 2);
    for (const auto& item : expected->named_buffers())
      EXPECT_TRUE(at::equal(model->named_buffers()[item.key()], item.value())) << item.key();
    model->scalar.fill_(comm->rank() + 7);
    rig.sharded->broadcast_buffers();
    EXPECT_EQ(model->scalar.item<double>(), 7);
  });
}

TEST(ModelView, RanksWithDifferentModelsAreNamed) {
  const std::string error = error_of([] {
    run_ranks(2, [](comm::CommunicatorPtr comm) {
      Chain model(2 + comm->rank());
      Rig(*model, comm, 1);
    });
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("same model")));
}

}  // namespace
}  // namespace tessera::zero::testing
