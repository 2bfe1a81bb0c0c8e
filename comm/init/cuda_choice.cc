#include "comm/init/cuda_choice.h"

#include <ATen/Context.h>

#include <filesystem>
#include <iterator>
#include <system_error>

#include "comm/nccl/nccl_plugin.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

int choose_cuda_device(const CudaDevices& devices, int local_rank, int local_world_size, bool may_share) {
  const int num = devices.num_visible;
  if (num == 0)
    throw Error("this host has no usable CUDA device (no driver, or CUDA_VISIBLE_DEVICES hides them)");
  if (num >= local_world_size) return local_rank;
  if (may_share) return local_rank % num;
  if (num == 1 && devices.num_on_host >= local_world_size) return 0;
  throw Error("this host has ", num, num == 1 ? " CUDA device for " : " CUDA devices for ", local_world_size,
              " ranks: expected one for each rank, or comm.backend \"staged\", over which "
              "ranks can share a device");
}

CudaDevices cuda_devices() {
  CudaDevices devices;
  devices.num_visible = TESSERA_RESOLVE(tessera_cuda_num_devices)();
  if (devices.num_visible > 0 && !at::hasCUDA())
    throw Error(
        "libtorch was asked for CUDA before it was loaded, and has none since (torch::manual_seed() asks, "
        "for one): expected tessera's initialize() or comm::join() before that");
  // The driver lists all of the machine here, whatever CUDA_VISIBLE_DEVICES says.
  std::error_code unknown;
  const std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus", unknown);
  if (!unknown) devices.num_on_host = static_cast<int>(std::distance(begin(gpus), end(gpus)));
  return devices;
}

std::string cuda_uuid(int device) {
  std::string uuid(16, '\0');
  TESSERA_RESOLVE(tessera_cuda_uuid)(device, uuid.data());
  return uuid;
}

void set_cuda_device(int device) { TESSERA_RESOLVE(tessera_cuda_set_device)(device); }

}  // namespace tessera::comm
