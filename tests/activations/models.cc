#include "tests/activations/models.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

namespace tessera::testing {
namespace {

torch::nn::LayerNorm layer_norm() { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})); }

struct MlpBlockImpl : torch::nn::Module {
  MlpBlockImpl() {
    norm = register_module("norm", layer_norm());
    up = register_module("up", torch::nn::Linear(kDim, 4 * kDim));
    down = register_module("down", torch::nn::Linear(4 * kDim, kDim));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::dropout(at::gelu(up->forward(norm->forward(x))), 0.1, is_training()));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(MlpBlock);

at::Tensor drop(const at::Tensor& x, const at::Generator& generator) {
  return x * at::empty_like(x).bernoulli_(0.9, generator).div_(0.9);
}

struct AttentionBlockImpl : torch::nn::Module {
  explicit AttentionBlockImpl(bool by_hand) : by_hand(by_hand) {
    norm1 = register_module("norm1", layer_norm());
    qkv = register_module("qkv", torch::nn::Linear(kDim, 3 * kDim));
    out = register_module("out", torch::nn::Linear(kDim, kDim));
    norm2 = register_module("norm2", layer_norm());
    up = register_module("up", torch::nn::Linear(kDim, 4 * kDim));
    down = register_module("down", torch::nn::Linear(4 * kDim, kDim));
  }
  at::Tensor attention(const at::Tensor& x, const at::Generator& generator) {
    const int64_t batch = x.size(0);
    const auto parts =
        qkv->forward(x).view({batch, kLength, 3, 4, kDim / 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    at::Tensor mixed;
    if (by_hand) {
      const at::Tensor scores = at::matmul(parts[0], parts[1].transpose(-2, -1)) / std::sqrt(kDim / 4.0);
      mixed = at::matmul(drop(scores.softmax(-1), generator), parts[2]);
    } else {
      mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    }
    return mixed.transpose(1, 2).reshape({batch, kLength, kDim});
  }
  at::Tensor forward(const at::Tensor& x, const at::Generator& generator) {
    const at::Tensor h = x + drop(out->forward(attention(norm1->forward(x), generator)), generator);
    return h + drop(down->forward(at::gelu(up->forward(norm2->forward(h)))), generator);
  }
  bool by_hand;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(AttentionBlock);

/// x² with a backward that needs x and the result.
struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    const at::Tensor result = x * x;
    context->save_for_backward({x, result});
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 2 * saved[0] + 0 * saved[1]};
  }
};

}  // namespace

DropoutMlpImpl::DropoutMlpImpl() {
  register_module("blocks", blocks);
  for (int i = 0; i < 3; ++i) blocks->push_back(MlpBlock());
}

at::Tensor DropoutMlpImpl::forward(const at::Tensor& x, const at::Tensor& target) {
  at::Tensor h = x;
  for (const auto& block : *blocks) h = block->as<MlpBlock>()->forward(h);
  return at::mse_loss(h, target);
}

AttentionNetImpl::AttentionNetImpl() {
  table = register_module("table", torch::nn::Embedding(kVocabulary, kDim));
  register_module("blocks", blocks);
  for (int i = 0; i < 3; ++i) blocks->push_back(AttentionBlock(i == 0));
  frozen = register_module("frozen", torch::nn::Linear(kDim, kDim));
  for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
}

at::Tensor AttentionNetImpl::forward(const at::Tensor& tokens, const at::Tensor& target,
                                     const at::Generator& generator) {
  at::Tensor h = table->forward(tokens);
  for (const auto& block : *blocks) h = block->as<AttentionBlock>()->forward(h, generator);
  h = at::silu(frozen->forward(h));
  const at::Tensor logits = at::matmul(h, table->weight.t());  // tied
  return at::cross_entropy_loss(logits.flatten(0, 1), target.flatten());
}

RecurrentImpl::RecurrentImpl() {
  lstm = register_module(
      "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kDim, 2 * kDim).num_layers(2).batch_first(true)));
  gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(2 * kDim, 2 * kDim).batch_first(true)));
  head = register_module("head", torch::nn::Linear(2 * kDim, kDim));
}

at::Tensor RecurrentImpl::forward(const at::Tensor& x, const at::Tensor& target) {
  const at::Tensor h = std::get<0>(gru->forward(at::gelu(std::get<0>(lstm->forward(x)))));
  return at::mse_loss(head->forward(at::tanh(h)), target);
}

BranchesImpl::BranchesImpl() {
  conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)));
  norm = register_module("norm", torch::nn::BatchNorm2d(4));
  left = register_module("left", torch::nn::Linear(kDim, kDim));
  right = register_module("right", torch::nn::Linear(kDim, kDim));
  head = register_module("head", torch::nn::Linear(3 * kDim, kDim));
}

at::Tensor BranchesImpl::forward(const at::Tensor& x, const at::Tensor& target, bool other_way) {
  const at::Tensor c = at::relu(norm->forward(conv->forward(x.unsqueeze(1)))).mean(1);
  at::Tensor a = at::gelu(left->forward(c)), b = at::silu(right->forward(c));
  if (other_way) a = at::leaky_relu(a * b.sigmoid(), 0.1);
  return at::mse_loss(head->forward(at::gelu(at::cat({a, b * a, c}, -1))), target);
}

InPlaceImpl::InPlaceImpl() {
  register_module("layers", layers);
  for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(kDim, kDim));
}

at::Tensor InPlaceImpl::forward(const at::Tensor& x, const at::Tensor& target) {
  const auto layer = [&](int i, const at::Tensor& input) {
    return layers[i]->as<torch::nn::Linear>()->forward(input);
  };
  at::Tensor input = x.clone();
  const at::Tensor before = at::gelu(input + 1);  // made of what is written next
  input.mul_(0.5).add_(0.25);
  at::Tensor h = layer(0, input + before).relu_();
  h = at::gelu(layer(1, h).add_(before));
  at::Tensor u = layer(2, h);
  u.narrow(-1, 0, kDim / 2).mul_(2);  // a view of it
  at::Tensor v = at::tanh(at::gelu(u) + u);
  v = Square::apply(at::sigmoid(v)).exp();
  std::vector<at::Tensor> chunks = at::unsafe_chunk(layer(3, v), 2, -1);
  const at::Tensor gate = chunks[0].sigmoid_(), cell = chunks[1].tanh_();
  return at::mse_loss(at::gelu(at::cat({gate * cell, cell}, -1)) + u, target);
}

namespace {

at::Tensor samples(int step, int64_t first, int64_t num, at::IntArrayRef sizes, uint64_t seed) {
  std::vector<int64_t> all{64};
  all.insert(all.end(), sizes.begin(), sizes.end());
  return randn(all, seed + step).narrow(0, first, num);
}

}  // namespace

at::Tensor dropout_mlp_loss(DropoutMlpImpl& model, int step, int64_t first, int64_t num) {
  at::manual_seed(1000 * step + first);
  return model.forward(samples(step, first, num, {kLength, kDim}, 100),
                       samples(step, first, num, {kLength, kDim}, 200));
}

at::Tensor attention_loss(AttentionNetImpl& model, int step, int64_t first, int64_t num) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1000 * step + first);
  return model.forward(randint(kVocabulary, {64, kLength}, 300 + step).narrow(0, first, num),
                       randint(kVocabulary, {64, kLength}, 400 + step).narrow(0, first, num), generator);
}

at::Tensor recurrent_loss(RecurrentImpl& model, int step, int64_t first, int64_t num) {
  return model.forward(samples(step, first, num, {kLength, kDim}, 500),
                       samples(step, first, num, {kLength, kDim}, 600));
}

at::Tensor branches_loss(BranchesImpl& model, int step, int64_t first, int64_t num) {
  return model.forward(samples(step, first, num, {kLength, kDim}, 700),
                       samples(step, first, num, {kLength, kDim}, 800), step % 2 == 1);
}

at::Tensor in_place_loss(InPlaceImpl& model, int step, int64_t first, int64_t num) {
  return model.forward(samples(step, first, num, {kLength, kDim}, 900),
                       samples(step, first, num, {kLength, kDim}, 950));
}

}  // namespace tessera::testing
