// Which CUDA device a rank takes.
#pragma once

#include <string>
#include <string_view>

namespace tessera::comm {

/// Counts what a rank sees of its host's devices.
struct CudaDevices {
  int num_visible = 0;  ///< to this process
  int num_on_host = 0;  ///< to the driver; 0: unknown
};

/// The ordinal of the device that the rank takes: its local rank, or 0 where it sees one device and
/// the host has one for each rank, as with Slurm's --gpus-per-task=1. Where ranks may share devices: its
/// local rank modulo the number of devices. Throws Error: no device, or fewer than ranks.
int choose_cuda_device(const CudaDevices& devices, int local_rank, int local_world_size, bool may_share);

/// Loads the plugin (core/cuda_plugin.h), and throws what that throws.
CudaDevices cuda_devices();

/// 16 bytes that no other device has, whichever process sees it. `device`: as this process numbers them.
/// Throws Error.
std::string cuda_uuid(int device);

/// Makes it the calling thread's current CUDA device.
void set_cuda_device(int device);

}  // namespace tessera::comm
