// BERT for sequence classification (Devlin et al. 2019). Plain libtorch, without
// anything for sharding.
//
// Modules and parameters have the names of Hugging Face's
// BertForSequenceClassification ("bert.encoder.layer.0.attention.self.query.weight") and compute the same, so
// that its weights can be loaded unchanged.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

/// Hugging Face's BertConfig, under its names. The defaults are for training
/// from scratch on a small data set.
struct BertOptions {
  int64_t vocab_size = 30522;
  int64_t hidden_size = 128;
  int64_t num_hidden_layers = 2;
  int64_t num_attention_heads = 4;
  int64_t intermediate_size = 512;
  int64_t max_position_embeddings = 512;  ///< tokens of a sample, at most
  int64_t type_vocab_size = 2;
  int64_t num_labels = 2;
  int64_t pad_token_id = 0;
  double hidden_dropout_prob = 0.1;
  double attention_probs_dropout_prob = 0.1;
  double classifier_dropout = 0.1;
  double layer_norm_eps = 1e-12;
  double initializer_range = 0.02;  ///< standard deviation of the weights' normal distribution
};

inline torch::nn::LayerNorm bert_layer_norm(const BertOptions& options) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.hidden_size}).eps(options.layer_norm_eps));
}

struct BertEmbeddingsImpl : torch::nn::Module {
  explicit BertEmbeddingsImpl(const BertOptions& options) {
    word_embeddings = register_module(
        "word_embeddings",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(options.vocab_size, options.hidden_size)
                                 .padding_idx(options.pad_token_id)));
    position_embeddings = register_module(
        "position_embeddings", torch::nn::Embedding(options.max_position_embeddings, options.hidden_size));
    token_type_embeddings = register_module(
        "token_type_embeddings", torch::nn::Embedding(options.type_vocab_size, options.hidden_size));
    norm = register_module("LayerNorm", bert_layer_norm(options));
    dropout = register_module("dropout", torch::nn::Dropout(options.hidden_dropout_prob));
  }

  /// input_ids, token_type_ids: (B, T) int64 -> (B, T, hidden)
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& token_type_ids) {
    const at::Tensor positions = at::arange(input_ids.size(1), input_ids.options());
    const at::Tensor sum = word_embeddings->forward(input_ids) +
                           token_type_embeddings->forward(token_type_ids) +
                           position_embeddings->forward(positions);
    return dropout->forward(norm->forward(sum));
  }

  torch::nn::Embedding word_embeddings{nullptr}, position_embeddings{nullptr}, token_type_embeddings{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(BertEmbeddings);

struct BertSelfAttentionImpl : torch::nn::Module {
  explicit BertSelfAttentionImpl(const BertOptions& options)
      : heads(options.num_attention_heads), dropout(options.attention_probs_dropout_prob) {
    query = register_module("query", torch::nn::Linear(options.hidden_size, options.hidden_size));
    key = register_module("key", torch::nn::Linear(options.hidden_size, options.hidden_size));
    value = register_module("value", torch::nn::Linear(options.hidden_size, options.hidden_size));
  }

  /// x: (B, T, hidden); mask: (B, 1, 1, T) bool, false for positions that are not
  /// attended to, or undefined -> (B, T, hidden)
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) {
    const int64_t batch = x.size(0), length = x.size(1), hidden = x.size(2);
    const auto by_head = [&](const at::Tensor& t) {
      return t.view({batch, length, heads, hidden / heads}).transpose(1, 2);
    };  // (B, heads, T, d)
    return at::scaled_dot_product_attention(
               by_head(query->forward(x)), by_head(key->forward(x)), by_head(value->forward(x)),
               mask.defined() ? std::optional(mask) : std::nullopt, is_training() ? dropout : 0.0)
        .transpose(1, 2)
        .reshape({batch, length, hidden});
  }

  int64_t heads;
  double dropout;
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr};
};
TORCH_MODULE(BertSelfAttention);

/// The end of both halves of a layer: a projection, dropout, and the norm of the sum with the half's input
/// (post-norm).
struct BertOutputImpl : torch::nn::Module {
  BertOutputImpl(int64_t input_size, const BertOptions& options) {
    dense = register_module("dense", torch::nn::Linear(input_size, options.hidden_size));
    norm = register_module("LayerNorm", bert_layer_norm(options));
    dropout = register_module("dropout", torch::nn::Dropout(options.hidden_dropout_prob));
  }

  /// x: (B, T, input_size), residual: (B, T, hidden) -> (B, T, hidden)
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual) {
    return norm->forward(dropout->forward(dense->forward(x)) + residual);
  }

  torch::nn::Linear dense{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(BertOutput);

struct BertAttentionImpl : torch::nn::Module {
  explicit BertAttentionImpl(const BertOptions& options) {
    self = register_module("self", BertSelfAttention(options));
    output = register_module("output", BertOutput(options.hidden_size, options));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) {
    return output->forward(self->forward(x, mask), x);
  }

  BertSelfAttention self{nullptr};
  BertOutput output{nullptr};
};
TORCH_MODULE(BertAttention);

/// One linear layer under a name of its own: "intermediate.dense", "pooler.dense".
struct BertDenseImpl : torch::nn::Module {
  BertDenseImpl(int64_t input_size, int64_t output_size) {
    dense = register_module("dense", torch::nn::Linear(input_size, output_size));
  }
  at::Tensor forward(const at::Tensor& x) { return dense->forward(x); }

  torch::nn::Linear dense{nullptr};
};
TORCH_MODULE(BertDense);

struct BertLayerImpl : torch::nn::Module {
  explicit BertLayerImpl(const BertOptions& options) {
    attention = register_module("attention", BertAttention(options));
    intermediate = register_module("intermediate", BertDense(options.hidden_size, options.intermediate_size));
    output = register_module("output", BertOutput(options.intermediate_size, options));
  }

  /// x: (B, T, hidden) -> (B, T, hidden)
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) {
    const at::Tensor attended = attention->forward(x, mask);
    return output->forward(at::gelu(intermediate->forward(attended)), attended);
  }

  BertAttention attention{nullptr};
  BertDense intermediate{nullptr};
  BertOutput output{nullptr};
};
TORCH_MODULE(BertLayer);

struct BertEncoderImpl : torch::nn::Module {
  explicit BertEncoderImpl(const BertOptions& options) {
    layer = register_module("layer", torch::nn::ModuleList());
    for (int64_t i = 0; i < options.num_hidden_layers; ++i) layer->push_back(BertLayer(options));
  }
  at::Tensor forward(at::Tensor x, const at::Tensor& mask) {
    for (const auto& one : *layer) x = one->as<BertLayer>()->forward(x, mask);
    return x;
  }

  torch::nn::ModuleList layer{nullptr};
};
TORCH_MODULE(BertEncoder);

/// The encoder without a task.
struct BertModelImpl : torch::nn::Module {
  explicit BertModelImpl(const BertOptions& options) {
    embeddings = register_module("embeddings", BertEmbeddings(options));
    encoder = register_module("encoder", BertEncoder(options));
    pooler = register_module("pooler", BertDense(options.hidden_size, options.hidden_size));
  }

  /// input_ids, token_type_ids: (B, T) int64; attention_mask: (B, T), not 0 for tokens, 0 for padding;
  /// undefined: no second sentence, no padding. -> last hidden state (B, T, hidden)
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& attention_mask = {},
                     const at::Tensor& token_type_ids = {}) {
    const at::Tensor types = token_type_ids.defined() ? token_type_ids : at::zeros_like(input_ids);
    at::Tensor mask;
    if (attention_mask.defined())
      mask = attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1);  // (B, 1, 1, T)
    return encoder->forward(embeddings->forward(input_ids, types), mask);
  }

  BertEmbeddings embeddings{nullptr};
  BertEncoder encoder{nullptr};
  BertDense pooler{nullptr};
};
TORCH_MODULE(BertModel);

struct BertForSequenceClassificationImpl : torch::nn::Module {
  explicit BertForSequenceClassificationImpl(const BertOptions& options) {
    bert = register_module("bert", BertModel(options));
    dropout = register_module("dropout", torch::nn::Dropout(options.classifier_dropout));
    classifier = register_module("classifier", torch::nn::Linear(options.hidden_size, options.num_labels));
    initialise(options);
  }

  /// Takes the arguments of BertModel's forward, and returns logits (B, num_labels).
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& attention_mask = {},
                     const at::Tensor& token_type_ids = {}) {
    const at::Tensor hidden = bert->forward(input_ids, attention_mask, token_type_ids);
    const at::Tensor pooled =
        at::tanh(bert->pooler->forward(hidden.select(1, 0)));  // of the first token, [CLS]: (B, hidden)
    return classifier->forward(dropout->forward(pooled));
  }

  /// Weights from a normal distribution, biases 0, norms 1 and 0, the embedding of padding 0.
  void initialise(const BertOptions& options) {
    const at::NoGradGuard no_grad;
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* linear = module->as<torch::nn::Linear>()) {
        torch::nn::init::normal_(linear->weight, 0.0, options.initializer_range);
        linear->bias.zero_();
      } else if (auto* embedding = module->as<torch::nn::Embedding>()) {
        torch::nn::init::normal_(embedding->weight, 0.0, options.initializer_range);
      }
    }
    bert->embeddings->word_embeddings->weight[options.pad_token_id].zero_();
  }

  BertModel bert{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear classifier{nullptr};
};
TORCH_MODULE(BertForSequenceClassification);
