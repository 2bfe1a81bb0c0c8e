// The NCCL half of libtessera_cuda.so: see nccl_plugin.h.
#include "comm/nccl/nccl_plugin.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstring>

#include "core/variables.h"

int tessera_cuda_num_devices() { return c10::cuda::device_count(); }

void tessera_cuda_uuid(int device, char* uuid) {
  cudaDeviceProp properties;
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  static_assert(sizeof properties.uuid == 16);
  std::memcpy(uuid, &properties.uuid, sizeof properties.uuid);
}

void tessera_cuda_set_device(int device) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(device)); }

void tessera_nccl_make_group(const c10::intrusive_ptr<c10d::Store>* store, int rank, int size, int device,
                             int64_t timeout_ms, c10::intrusive_ptr<c10d::Backend>* backend) {
  // By default NCCL's watchdog ends the process when a collective fails or takes too long.
  // CleanUpOnly (2) aborts the communicator instead, and the error shows in the works
  // (TransportCommunicator::reap), to be diagnosed like any other.
  tessera::set_default_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2");
  // Operations of several NCCL communicators on one device start in the order in which the host has given
  // them to it (NCCL 2.26 and later), which is the same on all ranks: [Note: one order on a device] in
  // zero/plan/collective_order.h.
  tessera::set_default_variable("NCCL_LAUNCH_ORDER_IMPLICIT", "1");
  // By default (NCCL 2.22 and later) ranks connect for an algorithm when a collective first takes it, and
  // that call waits for the same call of the others. It would come in a hook of the first backward, while
  // another rank waits in an agreement for this one.
  tessera::set_default_variable("NCCL_RUNTIME_CONNECT", "0");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::milliseconds(timeout_ms);
  options->group_name = "tessera";
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(*store, rank, size, options);
  const at::Device cuda(at::kCUDA, static_cast<c10::DeviceIndex>(device));
  group->setBoundDeviceId(cuda);
  // Else c10d makes the NCCL communicator in the group's first collective. That takes seconds,
  // waits for all ranks, and would come in the middle of the first backward, where other ranks may
  // stand in a gather that needs this one.
  group->eagerConnectSingleDevice(cuda);
  *backend = std::move(group);
}
