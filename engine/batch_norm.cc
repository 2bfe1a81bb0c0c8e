#include "engine/batch_norm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_batch_norm_impl_index.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace tessera {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor batch_norm(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training,
                      double momentum, double eps, bool cudnn_enabled) {
  const auto widened = [&](const MaybeTensor& parameter) -> MaybeTensor {
    const bool both = parameter && parameter->defined() && running_mean && running_mean->defined();
    if (!both || parameter->scalar_type() == running_mean->scalar_type()) return parameter;
    return parameter->to(running_mean->scalar_type());
  };
  return std::get<0>(at::_batch_norm_impl_index(input, widened(weight), widened(bias), running_mean,
                                                running_var, training, momentum, eps, cudnn_enabled));
}

}  // namespace

void let_batch_norm_widen_parameters() {
  const auto with_kernel = [](c10::DispatchKey key) {
    torch::Library library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library.impl("batch_norm", batch_norm);
    return library;
  };
  // Inference mode has no autograd: both keys of each device.
  static const std::array libraries{
      with_kernel(c10::DispatchKey::AutogradCPU), with_kernel(c10::DispatchKey::CPU),
      with_kernel(c10::DispatchKey::AutogradCUDA), with_kernel(c10::DispatchKey::CUDA)};
}

}  // namespace tessera
