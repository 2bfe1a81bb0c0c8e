// Models whose activations are large enough to be dropped (4 KiB), and their losses. Dropout draws from a
// generator that is a function of step and sample, because ranks that are threads share the default one.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "tests/support/parity.h"

namespace tessera::testing {

inline constexpr int64_t kDim = 64, kLength = 16, kVocabulary = 48;

/// Linear, gelu, dropout (of the default generator), linear; layer norm and residual around.
struct DropoutMlpImpl : torch::nn::Module {
  DropoutMlpImpl();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(DropoutMlp);

/// Attention by hand in the first block (softmax, dropout), scaled_dot_product_attention in the others.
struct AttentionNetImpl : torch::nn::Module {
  AttentionNetImpl();
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target, const at::Generator& generator);
  torch::nn::Embedding table{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear frozen{nullptr};
};
TORCH_MODULE(AttentionNet);

struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Recurrent);

/// Takes another way at every other step; a batch norm with running statistics.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target, bool other_way);
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear left{nullptr}, right{nullptr}, head{nullptr};
};
TORCH_MODULE(Branches);

/// In-place operators, on results, on views and on the input; a function with a backward of its own.
struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  torch::nn::ModuleList layers;
};
TORCH_MODULE(InPlace);

at::Tensor dropout_mlp_loss(DropoutMlpImpl& model, int step, int64_t first, int64_t num);
at::Tensor attention_loss(AttentionNetImpl& model, int step, int64_t first, int64_t num);
at::Tensor recurrent_loss(RecurrentImpl& model, int step, int64_t first, int64_t num);
at::Tensor branches_loss(BranchesImpl& model, int step, int64_t first, int64_t num);
at::Tensor in_place_loss(InPlaceImpl& model, int step, int64_t first, int64_t num);

}  // namespace tessera::testing
