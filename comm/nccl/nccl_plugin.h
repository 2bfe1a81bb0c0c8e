// The functions of libtessera_cuda.so that comm/ calls, by name and type. No CUDA type appears in them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>

extern "C" {

/// Devices this process can use; 0 without a driver.
int tessera_cuda_num_devices();
/// Writes the 16 bytes that identify the device to `uuid`. Throws c10::Error.
void tessera_cuda_uuid(int device, char* uuid);
/// Makes `device` the calling thread's current device.
void tessera_cuda_set_device(int device);
/// Collective. A new ProcessGroupNCCL on `device` in `*backend`, with its NCCL
/// communicator. Throws c10::Error.
void tessera_nccl_make_group(const c10::intrusive_ptr<c10d::Store>* store, int rank, int size, int device,
                             int64_t timeout_ms, c10::intrusive_ptr<c10d::Backend>* backend);
}
