// The CUDA side of the passes: calls the entry points of the plugin (cuda_abi.h) on torch's current stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <vector>

#include "core/cuda_plugin.h"
#include "core/error.h"
#include "zero/kernels/cuda_abi.h"
#include "zero/kernels/device_passes.h"

namespace tessera::kernels::cuda {

/// Calls an entry point with `args` and torch's current stream of `device`, where the pointers live; the
/// stream by way of libc10 (nothing of libtorch_cuda is linked). Throws tessera::Error when CUDA reports an
/// error, and TESSERA_RESOLVE when the plugin cannot be opened.
template <class Entry, class... Args>
void run(Entry entry, const char* pass, at::Device device, const Args&... args) {
  const c10::DeviceGuard guard(device);
  void* const stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  if (const char* const error = entry(args..., stream)) throw Error("CUDA: ", pass, " failed: ", error);
}

/// Makes the memory for the sums of all segments together. (It has fp64 elements, and at least one, so that
/// it has an address.)
template <class Segment>
at::Tensor scratch_for(const std::vector<Segment>& segments, at::Device device) {
  int64_t numel = 1;
  for (const Segment& segment : segments) numel += device::scratch_numel(segment.numel);
  return at::empty({numel}, at::TensorOptions().device(device).dtype(at::kDouble));
}

}  // namespace tessera::kernels::cuda
