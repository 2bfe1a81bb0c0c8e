// A U-Net (Ronneberger, Fischer, Brox 2015) as in milesial/Pytorch-UNet, with its parameter names. Plain
// libtorch, without anything for sharding.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/upsampling.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <vector>

struct UNetOptions {
  int64_t in_channels = 3;
  int64_t num_classes = 2;     ///< channels of the logits; 1: one logit per pixel, for a sigmoid
  int64_t base_channels = 64;  ///< at full resolution; doubled at every level
  int64_t depth = 4;           ///< number of times the resolution is halved
  bool bilinear = false;       ///< upsamples by interpolation instead of a transposed convolution
};

/// (convolution, batch norm, ReLU) twice.
struct DoubleConvImpl : torch::nn::Module {
  DoubleConvImpl(int64_t in, int64_t out, int64_t middle) {
    using namespace torch::nn;
    const auto conv = [](int64_t from, int64_t to) {
      return Conv2d(Conv2dOptions(from, to, 3).padding(1).bias(false));
    };
    double_conv = register_module("double_conv", Sequential(conv(in, middle), BatchNorm2d(middle), ReLU(),
                                                            conv(middle, out), BatchNorm2d(out), ReLU()));
  }
  /// (B, in, H, W) -> (B, out, H, W)
  at::Tensor forward(const at::Tensor& x) { return double_conv->forward(x); }

  torch::nn::Sequential double_conv{nullptr};
};
TORCH_MODULE(DoubleConv);

/// Halves the resolution, then a DoubleConv.
struct DownImpl : torch::nn::Module {
  DownImpl(int64_t in, int64_t out)
      : maxpool_conv(register_module(
            "maxpool_conv", torch::nn::Sequential(torch::nn::MaxPool2d(2), DoubleConv(in, out, out)))) {}
  /// (B, in, H, W) -> (B, out, H / 2, W / 2)
  at::Tensor forward(const at::Tensor& x) { return maxpool_conv->forward(x); }

  torch::nn::Sequential maxpool_conv;
};
TORCH_MODULE(Down);

/// Doubles the resolution, concatenates the skip connection before it, then a DoubleConv.
struct UpImpl : torch::nn::Module {
  UpImpl(int64_t in, int64_t out, bool bilinear) {
    using namespace torch::nn;
    if (bilinear) {
      const auto options = UpsampleOptions()
                               .scale_factor(std::vector<double>{2, 2})
                               .mode(torch::kBilinear)
                               .align_corners(true);
      interpolation = register_module("up", Upsample(options));
      conv = register_module("conv", DoubleConv(in, out, in / 2));
    } else {
      transposed = register_module("up", ConvTranspose2d(ConvTranspose2dOptions(in, in / 2, 2).stride(2)));
      conv = register_module("conv", DoubleConv(in, out, out));
    }
  }
  /// x: (B, ., h, w), skip: (B, ., H, W) with H / 2 = h and W / 2 = w, rounded down -> (B, out, H, W)
  at::Tensor forward(const at::Tensor& x, const at::Tensor& skip) {
    at::Tensor wide = interpolation.is_empty() ? transposed->forward(x) : interpolation->forward(x);
    const int64_t rows = skip.size(2) - wide.size(2),
                  columns = skip.size(3) - wide.size(3);  // 1 where the size was odd
    if (rows != 0 || columns != 0)
      wide = at::constant_pad_nd(wide, {columns / 2, columns - columns / 2, rows / 2, rows - rows / 2});
    return conv->forward(at::cat({skip, wide}, 1));
  }

  torch::nn::Upsample interpolation{nullptr};
  torch::nn::ConvTranspose2d transposed{nullptr};
  DoubleConv conv{nullptr};
};
TORCH_MODULE(Up);

struct OutConvImpl : torch::nn::Module {
  OutConvImpl(int64_t in, int64_t out)
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 1)))) {}
  at::Tensor forward(const at::Tensor& x) { return conv->forward(x); }

  torch::nn::Conv2d conv;
};
TORCH_MODULE(OutConv);

struct UNetImpl : torch::nn::Module {
  explicit UNetImpl(const UNetOptions& options = {}) {
    const int64_t factor =
        options.bilinear ? 2 : 1;  // interpolation keeps the number of channels, so they are halved before
    const auto channels = [&](int64_t level) { return options.base_channels << level; };
    inc = register_module("inc", DoubleConv(options.in_channels, channels(0), channels(0)));
    for (int64_t level = 1; level <= options.depth; ++level) {
      const int64_t out = channels(level) / (level == options.depth ? factor : 1);
      downs.push_back(register_module("down" + std::to_string(level), Down(channels(level - 1), out)));
    }
    for (int64_t level = options.depth; level >= 1; --level) {
      const int64_t out = channels(level - 1) / (level == 1 ? 1 : factor);
      ups.push_back(register_module("up" + std::to_string(options.depth - level + 1),
                                    Up(channels(level), out, options.bilinear)));
    }
    outc = register_module("outc", OutConv(options.base_channels, options.num_classes));
  }

  /// images: (B, in_channels, H, W) floating point, H and W at least 2^depth -> logits (B, num_classes, H, W)
  at::Tensor forward(const at::Tensor& images) {
    std::vector<at::Tensor> skips = {inc->forward(images)};
    for (Down& down : downs) skips.push_back(down->forward(skips.back()));
    at::Tensor x = skips.back();
    for (size_t i = 0; i < ups.size(); ++i) x = ups[i]->forward(x, skips[skips.size() - 2 - i]);
    return outc->forward(x);
  }

  DoubleConv inc{nullptr};
  std::vector<Down> downs;
  std::vector<Up> ups;
  OutConv outc{nullptr};
};
TORCH_MODULE(UNet);
