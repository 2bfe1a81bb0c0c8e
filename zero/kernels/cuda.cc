#include "zero/kernels/cuda.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/cuda_plugin.h"
#include "core/error.h"
#include "zero/kernels/cuda_abi.h"
#include "zero/kernels/device_passes.h"

namespace tessera::kernels::cuda {
namespace {

/// decltype only: the function is found at run time, never linked.
#define TESSERA_RESOLVE(name) reinterpret_cast<decltype(&(name))>(cuda_plugin_symbol(#name))

/// torch's current stream on the device, by way of libc10 (nothing of libtorch_cuda is linked).
void* current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void check(const char* error, const char* pass) {
  if (error != nullptr) throw Error("CUDA: ", pass, " failed: ", error);
}

at::Tensor empty_on(at::Device device, int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions().device(device).dtype(dtype));
}

/// Makes the memory for the sums of all segments together. (It has fp64 elements, and at least one, so that
/// it has an address.)
template <class Segment>
at::Tensor scratch_for(const std::vector<Segment>& segments, at::Device device) {
  int64_t numel = 1;
  for (const Segment& segment : segments) numel += device::scratch_numel(segment.numel);
  return empty_on(device, numel, at::kDouble);
}

int64_t count_of(size_t size) { return static_cast<int64_t>(size); }

}  // namespace

void squared_norms(const std::vector<ConstSpan>& grads, const std::vector<double*>& rows, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_squared_norms);
  const c10::DeviceGuard guard(device);
  const at::Tensor scratch = scratch_for(grads, device);
  check(launch(grads.data(), rows.data(), count_of(grads.size()), scratch.data_ptr<double>(),
               current_stream(device)),
        "squared_norms");
}

void update(const std::vector<Rule>& rules, const std::vector<UpdateArgs>& args, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_update);
  const c10::DeviceGuard guard(device);
  check(launch(rules.data(), args.data(), count_of(args.size()), current_stream(device)), "update");
}

void lamb_norms(const std::vector<LambRule>& rules, const std::vector<UpdateArgs>& args,
                const std::vector<double*>& rows, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_lamb_norms);
  const c10::DeviceGuard guard(device);
  const at::Tensor scratch = scratch_for(args, device);
  check(launch(rules.data(), args.data(), rows.data(), count_of(args.size()), scratch.data_ptr<double>(),
               current_stream(device)),
        "lamb_norms");
}

void lamb_apply(const std::vector<LambRule>& rules, const std::vector<float>& step_sizes,
                const std::vector<UpdateArgs>& args, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_lamb_apply);
  const c10::DeviceGuard guard(device);
  check(launch(rules.data(), step_sizes.data(), args.data(), count_of(args.size()), current_stream(device)),
        "lamb_apply");
}

void adam_8bit(const Adam8bitArgs& parameter, const AdamRule& rule, const Codebook& first,
               const Codebook& second, at::Device device) {
  static const auto launch = TESSERA_RESOLVE(tessera_cuda_adam_8bit);
  const c10::DeviceGuard guard(device);
  check(launch(&parameter, &rule, &first, &second, current_stream(device)), "adam_8bit");
}

}  // namespace tessera::kernels::cuda
