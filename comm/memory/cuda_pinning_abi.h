// The entry points of cuda_pinning.cu, which is part of the CUDA plugin (core/cuda_plugin.h). Each returns
// null or CUDA's error text.
#pragma once

#include <cstdint>

extern "C" {

/// cudaHostRegister: page-locks whole pages of the host's memory for the current device.
const char* tessera_cuda_pin(void* data, int64_t bytes);
/// cudaHostUnregister of what tessera_cuda_pin() was given.
const char* tessera_cuda_unpin(void* data);
}
