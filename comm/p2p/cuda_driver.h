// For cuda_memory.cu and cuda_stream.cu: the driver's functions, found at run time so that the plugin does
// not link libcuda, and what both need of the runtime.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace tessera::comm::p2p {

/// The version whose functions are asked for by name: the typedefs below are those of this toolkit's cuda.h.
inline constexpr unsigned kDriverVersion = 12000;

inline const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here: it is not the next call's
  return cudaGetErrorString(error);
}

/// Null when this driver has no such function.
template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found)
                                                                       : nullptr;
}

/// Whether this process uses the device.
inline bool has_context(int device) {
  static const auto get = driver_function<decltype(&cuDeviceGet)>("cuDeviceGet");
  static const auto state_of =
      driver_function<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  CUdevice handle = 0;
  unsigned flags = 0;
  int active = 0;
  return get != nullptr && state_of != nullptr && get(&handle, device) == CUDA_SUCCESS &&
         state_of(handle, &flags, &active) == CUDA_SUCCESS && active != 0;
}

/// Makes `device` current, with its primary context, until the end of the scope. The device before is not
/// made current again where that would make a context on it: a thread that has set none has device 0.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ != cudaSuccess) return;
    put_back_ = previous_ != device && has_context(previous_);
    error_ = cudaSetDevice(device);
  }
  ~OnDevice() {
    if (error_ == cudaSuccess && put_back_) cudaSetDevice(previous_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool put_back_ = false;
  cudaError_t error_;
};

/// A driver function as a static pointer; for use in functions that return an error text.
#define TESSERA_DRIVER(name)                                                  \
  static const auto name##_found = driver_function<decltype(&(name))>(#name); \
  if (name##_found == nullptr) return "this CUDA driver has no function " #name

inline const char* text_of(CUresult error) {
  if (error == CUDA_SUCCESS) return nullptr;
  static const auto name_of = driver_function<decltype(&cuGetErrorString)>("cuGetErrorString");
  const char* text = nullptr;
  if (name_of == nullptr || name_of(error, &text) != CUDA_SUCCESS || text == nullptr)
    return "an unknown error of the CUDA driver";
  return text;
}

}  // namespace tessera::comm::p2p
