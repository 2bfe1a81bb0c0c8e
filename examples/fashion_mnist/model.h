// A convolutional network for 28 x 28 grey images. Plain libtorch, without
// anything for sharding.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

struct FashionCnnOptions {
  int64_t channels = 24;  ///< of the first convolution; the second has twice as many
  int64_t hidden = 128;   ///< width of the layer before the classifier
  int64_t num_classes = 10;
  double dropout = 0.1;  ///< before the classifier
};

struct FashionCnnImpl : torch::nn::Module {
  explicit FashionCnnImpl(const FashionCnnOptions& options = {})
      : conv1(register_module(
            "conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, options.channels, 3).padding(1)))),
        conv2(register_module(
            "conv2", torch::nn::Conv2d(
                         torch::nn::Conv2dOptions(options.channels, 2 * options.channels, 3).padding(1)))),
        hidden(register_module("hidden", torch::nn::Linear(2 * options.channels * 7 * 7, options.hidden))),
        dropout(register_module("dropout", torch::nn::Dropout(options.dropout))),
        classifier(register_module("classifier", torch::nn::Linear(options.hidden, options.num_classes))) {}

  /// images: (B, 1, 28, 28) floating point. Returns logits (B, num_classes).
  at::Tensor forward(at::Tensor images) {
    at::Tensor x = at::relu(at::max_pool2d(conv1(images), 2));  // (B, C, 14, 14)
    x = at::relu(at::max_pool2d(conv2(x), 2));                  // (B, 2C, 7, 7)
    x = at::relu(hidden(x.flatten(1)));                         // (B, hidden)
    return classifier(dropout(x));
  }

  torch::nn::Conv2d conv1, conv2;
  torch::nn::Linear hidden;
  torch::nn::Dropout dropout;
  torch::nn::Linear classifier;
};
TORCH_MODULE(FashionCnn);
