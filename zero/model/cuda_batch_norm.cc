// Batch normalization on CUDA of a model in 16 bits whose running statistics stay in fp32 .
// There libtorch takes 16-bit inputs with fp32 statistics only if weight and bias are fp32, too; on the CPU
// it takes either. So they are cast, in sight of autograd. What libtorch takes as it is, gets there as it is.
#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include <optional>

namespace tessera::zero {
namespace {

at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  const auto is = [](const std::optional<at::Tensor>& tensor, at::ScalarType dtype) {
    return tensor && tensor->defined() && tensor->scalar_type() == dtype;
  };
  const bool cast = at::isReducedFloatingType(input.scalar_type()) && is(running_mean, at::kFloat);
  const auto taken = [&](const std::optional<at::Tensor>& tensor) {
    return cast && is(tensor, input.scalar_type()) ? std::optional(tensor->to(at::kFloat)) : tensor;
  };
  return at::native::batch_norm(input, taken(weight), taken(bias), running_mean, running_var, training,
                                momentum, eps, cudnn_enabled);
}

// Inference mode has no autograd: both keys.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("batch_norm", batch_norm); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("batch_norm", batch_norm); }

}  // namespace
}  // namespace tessera::zero
