// The entry points of cuda_memory.cu and cuda_stream.cu, which are part of the CUDA plugin
// (core/cuda_plugin.h). Each returns null or CUDA's error text, which lasts. `device` is an ordinal of this
// process; the calling thread's current device is the same afterwards.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/p2p/limits.h"
#include "core/dtype.h"

namespace tessera::comm::p2p {

/// A device, whoever sees it under whatever ordinal.
struct CudaUuid {
  unsigned char bytes[16];
};

/// Memory that is mapped in this process.
struct CudaMapping {
  uint64_t handle = 0;  ///< CUmemGenericAllocationHandle
  void* data = nullptr;
  int64_t bytes = 0;  ///< whole granules
};

/// shm::Reduction as plain data; pointers are device memory.
struct CudaReduction {
  const void* inputs[kMaxRanks];
  int num_inputs;
  DType dtype;
  int64_t numel;
  void* output;
  DType output_dtype;
  double scale;
  bool add;
};

}  // namespace tessera::comm::p2p

extern "C" {

// Cuda_memory.cu

/// Whether the device has what p2p needs; else the error says what it lacks.
const char* tessera_p2p_check(int device);
const char* tessera_p2p_uuid(int device, tessera::comm::p2p::CudaUuid* uuid);
/// *can: 1 when `device` can access the memory of the device with `uuid`, 0 when it cannot, -1 when this
/// process does not see that device.
const char* tessera_p2p_can_access(int device, const tessera::comm::p2p::CudaUuid* uuid, int* can);

/// At least `bytes` of new memory, mapped for `device`.
const char* tessera_p2p_allocate(int device, int64_t bytes, tessera::comm::p2p::CudaMapping* mapping);
/// *fd: a descriptor for other processes, which the caller closes.
const char* tessera_p2p_share(int device, const tessera::comm::p2p::CudaMapping* mapping, int* fd);
/// Maps what another process has allocated as `bytes` and shared as `fd`, which stays open.
const char* tessera_p2p_adopt(int device, int fd, int64_t bytes, tessera::comm::p2p::CudaMapping* mapping);
/// Waits for the device first.
const char* tessera_p2p_free(int device, const tessera::comm::p2p::CudaMapping* mapping);

/// Page-locks and maps whole pages of the host's memory, under the same addresses.
const char* tessera_p2p_register(int device, void* data, int64_t bytes);
const char* tessera_p2p_unregister(int device, void* data);

// Cuda_stream.cu. `stream` is a cudaStream_t, `event` a cudaEvent_t.

const char* tessera_p2p_make_stream(int device, void** stream);
const char* tessera_p2p_destroy_stream(int device, void* stream);
const char* tessera_p2p_make_event(int device, void** event);
const char* tessera_p2p_destroy_event(int device, void* event);
const char* tessera_p2p_record(int device, void* event, void* stream);
const char* tessera_p2p_stream_wait_event(int device, void* stream, void* event);
/// *passed: 1 or 0
const char* tessera_p2p_event_passed(int device, void* event, int* passed);
const char* tessera_p2p_stream_idle(int device, void* stream, int* idle);

const char* tessera_p2p_copy(int device, void* stream, void* to, const void* from, int64_t bytes);
const char* tessera_p2p_reduce(int device, void* stream, const tessera::comm::p2p::CudaReduction* reduction);
/// Registered host memory: 4 bytes become `value` once all before is visible to host and devices.
const char* tessera_p2p_write32(int device, void* stream, void* address, uint32_t value);
/// Until the 8 bytes at `address`, registered host memory, are at least `value` (both below 2^63).
const char* tessera_p2p_wait64(int device, void* stream, const void* address, uint64_t value);
}
