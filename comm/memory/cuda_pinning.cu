// Page-locks memory that exists. cudaHostRegisterPortable: for all devices of the process.
#include <cuda_runtime.h>

#include "comm/memory/cuda_pinning_abi.h"

static const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here: it is not the next call's
  return cudaGetErrorString(error);
}

const char* tessera_cuda_pin(void* data, int64_t bytes) {
  return text_of(cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable));
}

const char* tessera_cuda_unpin(void* data) { return text_of(cudaHostUnregister(data)); }
