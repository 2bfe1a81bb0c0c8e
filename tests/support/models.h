// Models and data for the tests: functions of a seed, on any thread, independent of the default generator.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <memory>

namespace tessera::testing {

at::Tensor randn(at::IntArrayRef sizes, uint64_t seed);
at::Tensor randint(int64_t high, at::IntArrayRef sizes, uint64_t seed);

/// Overwrites every parameter with small values that depend on its index and `seed` only.
void fill_parameters(torch::nn::Module& model, uint64_t seed);

/// Odd sizes everywhere, so that units need padding and shards cut through parameters.
struct MlpImpl : torch::nn::Module {
  MlpImpl();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  torch::nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Mlp);

/// One of every kind of module whose gradients do not depend on how the batch is divided (no batch
/// statistics).
struct ZooImpl : torch::nn::Module {
  ZooImpl();
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target);  // (B, T) int64, (B) int64
  struct Layers;
  std::shared_ptr<Layers> layers;
};
TORCH_MODULE(Zoo);

/// A tied, a frozen and an unused parameter, and one that only every other batch uses.
struct OddsImpl : torch::nn::Module {
  OddsImpl();
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target, bool with_sometimes);
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear frozen{nullptr}, middle{nullptr}, sometimes{nullptr}, unused{nullptr};
  at::Tensor decoder_weight;
};
TORCH_MODULE(Odds);

/// A loss without data: every rank's gradient is the same to the bit, and of ordinary size everywhere, so
/// that optimizers that magnify rounding (Adam) or look at signs only (Lion) can be compared across worlds.
struct BowlImpl : torch::nn::Module {
  BowlImpl();
  at::Tensor forward();
  at::Tensor weight, norm_weight, matrix, bias;
};
TORCH_MODULE(Bowl);

/// Batch statistics in training, running ones in evaluation.
struct NormNetImpl : torch::nn::Module {
  NormNetImpl();
  at::Tensor forward(const at::Tensor& x);
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormNet);

struct DropoutNetImpl : torch::nn::Module {
  DropoutNetImpl();
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(DropoutNet);

}  // namespace tessera::testing
