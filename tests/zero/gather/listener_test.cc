// OperatorListener and Residency: which operators make which units unsharded, and for how long.
#include "zero/gather/operator_listener.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/rnn.h>

#include "tests/zero/zero_testing.h"
#include "zero/gathered_parameters.h"

namespace tessera::zero::testing {
namespace {

/// Each parameter in a unit of its own, and room for one unit: an operator that needs several must still get
/// all.
void one_unit_at_a_time(ShardedModelOptions& options) {
  options.unit_numel = 16;
  options.residency.capacity_units = 1;
}

/// Three steps at stage 3 give the gradients of plain autograd, to the bit (one rank: nothing is summed).
template <class Model, class Loss>
void expect_plain_gradients(const Loss& loss_of) {
  Model model, plain;
  fill_parameters(*model, 1);
  fill_parameters(*plain, 1);
  Rig rig(*model, alone(), 3, one_unit_at_a_time);
  for (int step = 0; step < 3; ++step) {  // the first is recorded, the others replayed
    const std::vector<at::Tensor> expected = plain_gradients(*plain, loss_of(*plain));
    rig.backward(loss_of(*model));
    EXPECT_TRUE(same_bits(rig.gradients(), expected)) << "step " << step;
    EXPECT_GT(rig.residency().max_unsharded(), 1) << "the case should need more than one unit at once";
    rig.sharded->skip_step();
  }
}

struct LinearImpl : torch::nn::Module {
  LinearImpl() { layer = register_module("layer", torch::nn::Linear(9, 7)); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Linear);

TEST(Listener, UnitsStayUntilTheOutermostOperatorEndsLinear) {
  expect_plain_gradients<Linear>(
      [](LinearImpl& model) { return model.layer->forward(randn({6, 9}, 4)).square().sum(); });
}

struct LstmImpl : torch::nn::Module {
  LstmImpl() {
    lstm = register_module("lstm",
                           torch::nn::LSTM(torch::nn::LSTMOptions(5, 6).num_layers(2).bidirectional(true)));
  }
  torch::nn::LSTM lstm{nullptr};
};
TORCH_MODULE(Lstm);

TEST(Listener, UnitsStayUntilTheOutermostOperatorEndsLstm) {
  expect_plain_gradients<Lstm>(
      [](LstmImpl& model) { return std::get<0>(model.lstm->forward(randn({4, 2, 5}, 4))).square().sum(); });
}

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    attention = register_module("attention",
                                torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(12, 3)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
  }
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Attention);

TEST(Listener, UnitsStayUntilTheOutermostOperatorEndsAttention) {
  expect_plain_gradients<Attention>([](AttentionImpl& model) {
    const at::Tensor x = model.norm->forward(randn({5, 2, 12}, 4));
    return std::get<0>(model.attention->forward(x, x, x)).square().sum();
  });
}

// As torch.compile's code does: no operator, but an event that has the parameters among its inputs, and in
// backward one that has the same number.
TEST(Listener, ACompiledGraphHasItsParametersUntilItEndsAndSoDoesItsBackward) {
  Attention model;
  fill_parameters(*model, 1);
  const at::Tensor first = model->attention->in_proj_weight, second = model->attention->out_proj->weight;
  const at::Tensor expected_first = first.clone(), expected_second = second.clone();
  Rig rig(*model, alone(), 3, one_unit_at_a_time);
  const auto expect_readable = [&](const char* where) {
    const at::DisableRecordFunctionGuard silent;  // a raw read
    EXPECT_TRUE(at::equal(first, expected_first)) << where;
    EXPECT_TRUE(at::equal(second, expected_second)) << where;
  };
  for (int64_t number = 7; number < 9; ++number) {
    {
      RECORD_FUNCTION("CompiledFunction", std::vector<c10::IValue>({randn({2}, 1), first, second}), number);
      expect_readable("forward");
      first.sum();
      expect_readable("after an operator inside of the graph");
    }
    model->norm->weight.sum();
    EXPECT_EQ(rig.residency().num_unsharded(), 1) << "a graph's parameters go when it has ended";
    {
      at::RecordFunction backward(at::RecordScope::BACKWARD_FUNCTION);
      backward.setForwardThreadId(at::RecordFunction::currentThreadId());
      backward.before("CompiledFunctionBackward", number);
      expect_readable("backward");
    }
    model->norm->weight.sum();
    EXPECT_EQ(rig.residency().num_unsharded(), 1);
  }
}

TEST(Listener, TensorListsCount) {
  Chain model(2);
  Chain plain(2);
  Rig rig(*model, alone(), 3);
  const at::Tensor stacked = at::stack({model->layers[0]->weight, model->layers[1]->weight});
  EXPECT_TRUE(at::equal(stacked, at::stack({plain->layers[0]->weight, plain->layers[1]->weight})));
  EXPECT_EQ(rig.residency().counts().gathers, (std::vector<int>{1, 1, 0}));
}

TEST(Listener, OptionalTensorsCount) {
  Chain model(2);
  Chain plain(2);
  Rig rig(*model, alone(), 3);
  const at::Tensor x = randn({3, kWidth}, 5);
  const auto norm = [&](Chain& of) {
    return at::layer_norm(x, {kWidth}, /*weight=*/{}, /*bias=*/of->layers[1]->bias);
  };
  EXPECT_TRUE(at::equal(norm(model), norm(plain)));
  EXPECT_EQ(rig.residency().counts().gathers, (std::vector<int>{0, 1, 0}));
}

/// Reads by raw pointer, as kernels do: the sum of all elements of the defined ones.
at::Tensor sum_of_present(const c10::List<std::optional<at::Tensor>>& tensors) {
  float sum = 0;
  for (const std::optional<at::Tensor>& tensor : tensors)
    for (int64_t i = 0; tensor && i < tensor->numel(); ++i)
      sum += static_cast<const float*>(tensor->const_data_ptr())[i];
  return at::scalar_tensor(sum);
}

TORCH_LIBRARY(tessera_test, library) {
  library.def("sum_of_present(Tensor?[] tensors) -> Tensor",
              torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(sum_of_present)));
}

TEST(Listener, TensorsBehindANoneCount) {
  static const auto sum = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("tessera_test::sum_of_present", "")
                              .typed<at::Tensor(const c10::List<std::optional<at::Tensor>>&)>();
  Chain model(3), plain(3);
  Rig rig(*model, alone(), 3);
  const at::NoGradGuard no_grad;
  const auto of = [&](Chain& chain) {
    return sum.call({std::nullopt, chain->layers[2]->bias, std::nullopt, chain->layers[1]->bias})
        .item<float>();
  };
  EXPECT_EQ(of(model), of(plain));
  EXPECT_EQ(rig.residency().counts().gathers, (std::vector<int>{0, 1, 1, 0}));
}

TEST(Listener, ViewsOfParametersCount) {
  Chain model(1);
  Rig rig(*model, alone(), 3);
  const at::Tensor row = model->layers[0]->weight.detach().t()[2];
  rig.residency().drop_pass();
  rig.update();  // reshards
  EXPECT_TRUE(at::equal(row, Chain(1)->layers[0]->weight.t()[2]));
}

struct LookupImpl : torch::nn::Module {
  LookupImpl() {
    table = register_module("table", torch::nn::Embedding(11, kWidth));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Lookup);

TEST(Listener, AnEmbeddingsBackwardGathersNothing) {
  Lookup model;
  Rig rig(*model, alone(), 3, [](ShardedModelOptions& options) { options.residency.capacity_units = 1; });
  for (int step = 0; step < 3; ++step) {
    rig.backward(model->head->forward(model->table->forward(randint(11, {4}, step))).square().sum());
    EXPECT_EQ(rig.residency().counts().gathers[0], 1) << "step " << step;
    EXPECT_LE(rig.residency().counts().gathers[1], 2) << "step " << step;
    rig.update();
  }
}

/// torch.utils.checkpoint: keeps the input only; backward computes the segment
/// again and runs a backward inside.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            ChainImpl* chain) {
    context->save_for_backward({x});
    context->saved_data["chain"] = reinterpret_cast<int64_t>(chain);
    return chain->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto* chain = reinterpret_cast<ChainImpl*>(context->saved_data["chain"].toInt());
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({chain->forward(x)}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

TEST(Listener, ACheckpointedSegmentIsNotResidentAsAWhole) {
  constexpr int kNumLayers = 8;
  Chain model(kNumLayers), plain(kNumLayers);
  Rig rig(*model, alone(), 3);
  const at::Tensor x = randn({2, kWidth}, 6).requires_grad_();
  const std::vector<at::Tensor> expected = plain_gradients(*plain, plain->forward(x).sum());
  for (int step = 0; step < 3; ++step) {
    rig.backward(Checkpoint::apply(x, model.get()).sum());
    EXPECT_TRUE(same_bits(rig.gradients(), expected));
    EXPECT_LE(rig.residency().max_unsharded(), 2) << "step " << step;
    rig.sharded->skip_step();
  }
}

TEST(Listener, ABlockMarkedForProfilersPinsNothing) {
  Chain model(6);
  Rig rig(*model, alone(), 3);
  {
    RECORD_FUNCTION("the whole model", {});
    rig.backward(model->forward(randn({2, kWidth}, 6)).sum());
  }
  EXPECT_LE(rig.residency().max_unsharded(), 2);
}

TEST(Listener, AnAnnouncedGraphKeepsItsInputsUntilItEnds) {
  Chain model(3);
  Rig rig(*model, alone(), 3);
  const at::Tensor& weight = model->layers[1]->weight;
  const auto can_be_read = [](const at::Tensor& tensor) {
    try {
      return tensor.data_ptr() != nullptr;
    } catch (const c10::Error&) {
      return false;
    }
  };
  ASSERT_FALSE(can_be_read(weight));
  {
    const CompiledGraphRead graph({at::ones({2}), weight, at::Tensor()});
    EXPECT_TRUE(can_be_read(weight));
    EXPECT_FALSE(can_be_read(model->layers[2]->weight)) << "no input of the graph";
    model->layers[0]->weight.sum();  // the operators that a graph calls
    EXPECT_TRUE(can_be_read(weight));
  }
  const GatheredParameters gathered(*rig.sharded, {"fc2.weight"});  // the pass is in order
  EXPECT_TRUE(can_be_read(model->layers[2]->weight));
}

TEST(Listener, TwoModelsOnOneThread) {
  Chain a(4, 1), b(4, 50), plain_a(4, 1), plain_b(4, 50);
  const at::Tensor x = randn({2, kWidth}, 7);
  const std::vector<at::Tensor> expected_a =
      plain_gradients(*plain_a, plain_b->forward(plain_a->forward(x)).sum());
  Rig rig_a(*a, alone(), 3);
  auto rig_b = std::make_unique<Rig>(*b, alone(), 3);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = b->forward(a->forward(x)).sum();
    rig_b->sharded->gradients().begin_backward(true, true);
    rig_a.backward(loss);
    rig_b->sharded->gradients().finish_backward();
    rig_b->residency().end_pass();
    EXPECT_TRUE(same_bits(rig_a.gradients(), expected_a));
    rig_a.sharded->skip_step();
    rig_b->sharded->skip_step();
  }
  rig_b.reset();  // rig_a's listener stays active
  rig_a.backward(a->forward(x).sum());
  EXPECT_TRUE(same_bits(rig_a.gradients(), plain_gradients(*plain_a, plain_a->forward(x).sum())));
}

}  // namespace
}  // namespace tessera::zero::testing
