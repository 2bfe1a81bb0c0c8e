// A GPT. Plain libtorch, without anything for sharding. Pre-norm blocks, fused query-key-value
// projection, causal attention, learned positions, an untied output projection.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>

struct GptOptions {
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t vocabulary = 256;  ///< 256 for bytes
  int64_t sequence = 128;    ///< tokens of a sample, at most
  /// Computes the loss from hidden states (B, T, dim), the output projection (vocabulary, dim) and targets
  /// (B, T), in place of the cross-entropy of all logits.
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target)>
      loss = {};
};

/// What PyTorch's nn.Linear does. torch::nn::Linear adds the bias of inputs with three dimensions in a pass
/// of its own.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

struct GptBlockImpl : torch::nn::Module {
  explicit GptBlockImpl(const GptOptions& options) : heads(options.heads) {
    const int64_t dim = options.dim;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    qkv = register_module("qkv", torch::nn::Linear(dim, 3 * dim));
    out = register_module("out", torch::nn::Linear(dim, dim));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    up = register_module("up", torch::nn::Linear(dim, 4 * dim));
    down = register_module("down", torch::nn::Linear(4 * dim, dim));
  }

  /// x: (B, T, dim) -> (B, T, dim)
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + linear(out, attention(norm1->forward(x)));
    return h + linear(down, at::gelu(linear(up, norm2->forward(h))));
  }

  /// x: (B, T, dim) -> (B, T, dim)
  at::Tensor attention(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), dim = x.size(2);
    // (B, T, 3 dim) -> 3 of (B, heads, T, dim / heads)
    const auto parts =
        linear(qkv, x).view({batch, length, 3, heads, dim / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    return at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                            /*is_causal=*/true)
        .transpose(1, 2)
        .reshape({batch, length, dim});
  }

  int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(GptBlock);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options) : loss(options.loss) {
    tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.dim));
    positions = register_module("positions", torch::nn::Embedding(options.sequence, options.dim));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t layer = 0; layer < options.layers; ++layer) blocks->push_back(GptBlock(options));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.dim})));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(options.dim, options.vocabulary).bias(false)));
  }

  /// input, target: (B, T) int64 token numbers -> () mean cross-entropy;
  /// without a target: logits (B, T, vocabulary)
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target = {}) {
    const at::Tensor place = at::arange(input.size(1), input.options());
    at::Tensor x = tokens->forward(input) + positions->forward(place);
    for (const auto& block : *blocks) x = block->as<GptBlock>()->forward(x);
    x = norm->forward(x);
    if (target.defined() && loss) return loss(x, head->weight, target);
    const at::Tensor logits = linear(head, x);  // (B, T, vocabulary)
    return target.defined() ? at::cross_entropy_loss(logits.flatten(0, 1), target.flatten()) : logits;
  }

  decltype(GptOptions::loss) loss;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);
