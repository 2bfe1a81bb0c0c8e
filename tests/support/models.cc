#include "tests/support/models.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/enum.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>

#include <cmath>

namespace tessera::testing {

at::Tensor randn(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::TensorOptions());
}

at::Tensor randint(int64_t high, at::IntArrayRef sizes, uint64_t seed) {
  return at::randint(high, sizes, at::make_generator<at::CPUGeneratorImpl>(seed),
                     at::TensorOptions().dtype(at::kLong));
}

void fill_parameters(torch::nn::Module& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    parameter.copy_(randn(parameter.sizes(), ++seed) * 0.2);
    if (parameter.dim() > 1) parameter.mul_(1.0 / std::sqrt(static_cast<double>(parameter.size(1))) * 3);
  }
}

MlpImpl::MlpImpl() {
  fc1 = register_module("fc1", torch::nn::Linear(7, 13));
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({13})));
  fc2 = register_module("fc2", torch::nn::Linear(13, 11));
  fc3 = register_module("fc3", torch::nn::Linear(11, 3));
}

at::Tensor MlpImpl::forward(const at::Tensor& x, const at::Tensor& target) {
  at::Tensor h = at::gelu(norm->forward(fc1->forward(x)));
  h = at::tanh(fc2->forward(h));
  return at::mse_loss(fc3->forward(h), target);
}

struct ZooImpl::Layers {
  torch::nn::Embedding embedding{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
  torch::nn::Conv1d conv1d{nullptr};
  torch::nn::Conv2d conv2d{nullptr};
  torch::nn::ConvTranspose1d transposed{nullptr};
  torch::nn::GroupNorm group_norm{nullptr};
  torch::nn::LayerNorm layer_norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::TransformerEncoderLayer encoder{nullptr};
  torch::nn::TransformerDecoderLayer decoder{nullptr};
  torch::nn::PReLU prelu{nullptr};
  torch::nn::Bilinear bilinear{nullptr};
  torch::nn::Linear head{nullptr};
};

ZooImpl::ZooImpl() : layers(std::make_shared<Layers>()) {
  layers->embedding = register_module("embedding", torch::nn::Embedding(17, 12));
  layers->bag = register_module(
      "bag", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(17, 12).mode(torch::kSum)));
  layers->conv1d =
      register_module("conv1d", torch::nn::Conv1d(torch::nn::Conv1dOptions(12, 12, 3).padding(1)));
  layers->conv2d = register_module("conv2d", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 3, 3).padding(1)));
  layers->transposed = register_module(
      "transposed", torch::nn::ConvTranspose1d(torch::nn::ConvTranspose1dOptions(12, 12, 3).padding(1)));
  layers->group_norm =
      register_module("group_norm", torch::nn::GroupNorm(torch::nn::GroupNormOptions(3, 12)));
  layers->layer_norm = register_module("layer_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
  layers->lstm = register_module(
      "lstm",
      torch::nn::LSTM(torch::nn::LSTMOptions(12, 6).bidirectional(true).batch_first(true).num_layers(2)));
  layers->gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(12, 12).batch_first(true)));
  layers->attention = register_module(
      "attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(12, 3)));
  layers->encoder = register_module(
      "encoder", torch::nn::TransformerEncoderLayer(
                     torch::nn::TransformerEncoderLayerOptions(12, 2).dim_feedforward(20).dropout(0.0)));
  layers->decoder = register_module(
      "decoder", torch::nn::TransformerDecoderLayer(
                     torch::nn::TransformerDecoderLayerOptions(12, 2).dim_feedforward(20).dropout(0.0)));
  layers->prelu = register_module("prelu", torch::nn::PReLU(torch::nn::PReLUOptions().num_parameters(12)));
  layers->bilinear = register_module("bilinear", torch::nn::Bilinear(torch::nn::BilinearOptions(12, 12, 5)));
  layers->head = register_module("head", torch::nn::Linear(5, 4));
}

at::Tensor ZooImpl::forward(const at::Tensor& tokens, const at::Tensor& target) {
  at::Tensor x = layers->embedding->forward(tokens) + layers->bag->forward(tokens).unsqueeze(1);
  at::Tensor c = x.transpose(1, 2);
  c = layers->group_norm->forward(layers->transposed->forward(at::relu(layers->conv1d->forward(c))));
  c = c + layers->conv2d->forward(c.unsqueeze(1)).mean(1);
  x = layers->layer_norm->forward(c.transpose(1, 2));
  x = std::get<0>(layers->lstm->forward(x));
  x = std::get<0>(layers->gru->forward(x));
  at::Tensor s = x.transpose(0, 1);
  s = s + std::get<0>(layers->attention->forward(s, s, s));
  const at::Tensor memory = layers->encoder->forward(s);
  s = layers->decoder->forward(s, memory);
  const at::Tensor pooled = layers->prelu->forward(s.mean(0));
  return at::cross_entropy_loss(layers->head->forward(layers->bilinear->forward(pooled, memory.mean(0))),
                                target);
}

OddsImpl::OddsImpl() {
  table = register_module("table", torch::nn::Embedding(19, 9));
  frozen = register_module("frozen", torch::nn::Linear(9, 9));
  for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  middle = register_module("middle", torch::nn::Linear(9, 9));
  sometimes = register_module("sometimes", torch::nn::Linear(9, 9));
  unused = register_module("unused", torch::nn::Linear(5, 31));
  decoder_weight = register_parameter("decoder_weight", table->weight);
}

at::Tensor OddsImpl::forward(const at::Tensor& tokens, const at::Tensor& target, bool with_sometimes) {
  at::Tensor h = frozen->forward(table->forward(tokens));
  h = at::tanh(middle->forward(h));
  if (with_sometimes) h = h + sometimes->forward(h);
  return at::cross_entropy_loss(at::matmul(h.mean(1), decoder_weight.t()), target);
}

BowlImpl::BowlImpl() {
  weight = register_parameter("weight", at::zeros({9, 23}));
  norm_weight = register_parameter("norm_weight", at::zeros({37}));
  matrix = register_parameter("matrix", at::zeros({13, 11}));
  bias = register_parameter("bias", at::zeros({5}));
}

at::Tensor BowlImpl::forward() {
  at::Tensor loss = at::zeros({});
  uint64_t seed = 40;
  for (const at::Tensor& parameter : parameters()) {
    const at::Tensor distance = parameter - randn(parameter.sizes(), ++seed);
    loss = loss + (distance.square() * (0.5 + randn(parameter.sizes(), ++seed).abs())).sum();
  }
  return loss;
}

NormNetImpl::NormNetImpl() {
  fc1 = register_module("fc1", torch::nn::Linear(6, 24));
  norm = register_module("norm", torch::nn::BatchNorm1d(24));
  fc2 = register_module("fc2", torch::nn::Linear(24, 3));
}

at::Tensor NormNetImpl::forward(const at::Tensor& x) {
  return fc2->forward(at::relu(norm->forward(fc1->forward(x))));
}

DropoutNetImpl::DropoutNetImpl() {
  fc1 = register_module("fc1", torch::nn::Linear(7, 40));
  fc2 = register_module("fc2", torch::nn::Linear(40, 3));
}

at::Tensor DropoutNetImpl::forward(const at::Tensor& x, const at::Tensor& target) {
  const at::Tensor h = at::dropout(at::relu(fc1->forward(x)), 0.5, is_training());
  return at::mse_loss(fc2->forward(h), target);
}

}  // namespace tessera::testing
