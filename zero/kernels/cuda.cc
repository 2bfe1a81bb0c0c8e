#include "zero/kernels/cuda.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/str.h"
#include "zero/kernels/cuda_abi.h"

namespace tessera::kernels::cuda {
namespace {

/// decltype only: the function is found at run time, never linked.
#define TESSERA_RESOLVE(name) reinterpret_cast<decltype(&(name))>(cuda_plugin_symbol(#name))

/// torch's current stream on the device, by way of libc10 (nothing of libtorch_cuda is linked).
void* current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void check(const char* error, const char* pass) {
  if (error != nullptr) throw Error(str("CUDA: ", pass, " failed: ", error));
}

at::Tensor empty_on(at::Device device, int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions().device(device).dtype(dtype));
}

}  // namespace

at::Tensor squared_norm(const ConstSpan& grad, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_squared_norm);
  const c10::DeviceGuard guard(device);
  const at::Tensor scratch = empty_on(device, kCudaScratchNumel, at::kDouble);
  check(launch(&grad, scratch.data_ptr<double>(), current_stream(device)), "squared_norm");
  return scratch.narrow(0, 0, 2).clone();  // not all of the scratch
}

int64_t first_nonfinite(const ConstSpan& grad, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_first_nonfinite);
  const c10::DeviceGuard guard(device);
  const at::Tensor index = empty_on(device, 1, at::kLong);
  check(launch(&grad, index.data_ptr<int64_t>(), current_stream(device)), "first_nonfinite");
  return index.item<int64_t>();
}

void update(const Rule& rule, const UpdateArgs& args, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_update);
  const c10::DeviceGuard guard(device);
  check(launch(&rule, &args, current_stream(device)), "update");
}

LambPart lamb_norms(const LambRule& rule, const UpdateArgs& args, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_lamb_norms);
  const c10::DeviceGuard guard(device);
  const at::Tensor scratch = empty_on(device, kCudaScratchNumel, at::kDouble);
  check(launch(&rule, &args, scratch.data_ptr<double>(), current_stream(device)), "lamb_norms");
  const at::Tensor result = scratch.narrow(0, 0, 2).cpu();
  const auto* values = result.const_data_ptr<double>();
  return {values[0], values[1]};
}

void lamb_apply(const LambRule& rule, float step_size, const UpdateArgs& args, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_lamb_apply);
  const c10::DeviceGuard guard(device);
  check(launch(&rule, step_size, &args, current_stream(device)), "lamb_apply");
}

}  // namespace tessera::kernels::cuda
