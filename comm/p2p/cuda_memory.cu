// Memory that other processes map (CUDA's virtual memory management) and flags of the host that streams use.
// Every function is read against the documentation of CUDA 13 in cuda.h and cuda_runtime_api.h.
#include <cstring>

#include "comm/p2p/cuda_abi.h"
#include "comm/p2p/cuda_driver.h"

namespace tessera::comm::p2p {
namespace {

#define TESSERA_RETURN_IF(call) \
  if (const char* const text = text_of(call); text != nullptr) return text

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

/// *whole: `bytes` as whole granules. At least 2 MiB each, so that exporter and importer round alike.
const char* round_up(int device, int64_t bytes, size_t* whole) {
  TESSERA_DRIVER(cuMemGetAllocationGranularity);
  const CUmemAllocationProp prop = properties(device);
  size_t granule = 0;
  TESSERA_RETURN_IF(cuMemGetAllocationGranularity_found(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  constexpr size_t kGranule = size_t{2} << 20;
  if (granule < kGranule) granule = kGranule;
  *whole = (static_cast<size_t>(bytes) + granule - 1) / granule * granule;
  return nullptr;
}

/// Maps the handle, and gives it back when that fails.
const char* map(int device, CUmemGenericAllocationHandle handle, size_t bytes, CudaMapping* mapping) {
  TESSERA_DRIVER(cuMemAddressReserve);
  TESSERA_DRIVER(cuMemAddressFree);
  TESSERA_DRIVER(cuMemMap);
  TESSERA_DRIVER(cuMemUnmap);
  TESSERA_DRIVER(cuMemSetAccess);
  TESSERA_DRIVER(cuMemRelease);
  CUdeviceptr address = 0;
  const char* error = text_of(cuMemAddressReserve_found(&address, bytes, 0, 0, 0));
  if (error != nullptr) {
    cuMemRelease_found(handle);
    return error;
  }
  error = text_of(cuMemMap_found(address, bytes, 0, handle, 0));
  if (error == nullptr) {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    error = text_of(cuMemSetAccess_found(address, bytes, &access, 1));
    if (error != nullptr) cuMemUnmap_found(address, bytes);
  }
  if (error != nullptr) {
    cuMemAddressFree_found(address, bytes);
    cuMemRelease_found(handle);
    return error;
  }
  *mapping = {handle, reinterpret_cast<void*>(address), static_cast<int64_t>(bytes)};
  return nullptr;
}

const char* needs(int device, cudaDeviceAttr attribute, const char* what) {
  int has = 0;
  TESSERA_RETURN_IF(cudaDeviceGetAttribute(&has, attribute, device));
  return has != 0 ? nullptr : what;
}

const char* needs(int device, CUdevice_attribute attribute, const char* what) {
  TESSERA_DRIVER(cuDeviceGet);
  TESSERA_DRIVER(cuDeviceGetAttribute);
  CUdevice of_driver = 0;
  int has = 0;
  TESSERA_RETURN_IF(cuDeviceGet_found(&of_driver, device));
  TESSERA_RETURN_IF(cuDeviceGetAttribute_found(&has, attribute, of_driver));
  return has != 0 ? nullptr : what;
}

const char* uuid_of(int device, CudaUuid* uuid) {
  cudaDeviceProp prop;
  TESSERA_RETURN_IF(cudaGetDeviceProperties(&prop, device));
  static_assert(sizeof prop.uuid == sizeof *uuid);
  std::memcpy(uuid, &prop.uuid, sizeof *uuid);
  return nullptr;
}

}  // namespace
}  // namespace tessera::comm::p2p

using namespace tessera::comm::p2p;

const char* tessera_p2p_check(int device) {
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  const char* lacks = needs(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                            "the device has no virtual memory management");
  if (lacks == nullptr)
    lacks = needs(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                  "the device cannot export memory as a file descriptor");
  if (lacks == nullptr)
    lacks = needs(device, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
                  "the device has no 64-bit stream memory operations");
  if (lacks == nullptr)
    lacks = needs(device, cudaDevAttrHostRegisterSupported, "the device cannot register host memory");
  if (lacks == nullptr)
    lacks = needs(device, cudaDevAttrCanUseHostPointerForRegisteredMem,
                  "the device has other addresses for registered host memory than the host");
  return lacks;
}

const char* tessera_p2p_uuid(int device, CudaUuid* uuid) { return uuid_of(device, uuid); }

const char* tessera_p2p_can_access(int device, const CudaUuid* uuid, int* can) {
  int num_devices = 0;
  TESSERA_RETURN_IF(cudaGetDeviceCount(&num_devices));
  *can = -1;
  for (int other = 0; other < num_devices; ++other) {
    CudaUuid theirs;
    if (const char* const error = uuid_of(other, &theirs); error != nullptr) return error;
    if (std::memcmp(&theirs, uuid, sizeof theirs) != 0) continue;
    if (other == device) {
      *can = 1;
      return nullptr;
    }
    return text_of(cudaDeviceCanAccessPeer(can, device, other));
  }
  return nullptr;
}

const char* tessera_p2p_allocate(int device, int64_t bytes, CudaMapping* mapping) {
  TESSERA_DRIVER(cuMemCreate);
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  size_t whole = 0;
  if (const char* const error = round_up(device, bytes, &whole); error != nullptr) return error;
  const CUmemAllocationProp prop = properties(device);
  CUmemGenericAllocationHandle handle = 0;
  TESSERA_RETURN_IF(cuMemCreate_found(&handle, whole, &prop, 0));
  return map(device, handle, whole, mapping);
}

const char* tessera_p2p_share(int device, const CudaMapping* mapping, int* fd) {
  TESSERA_DRIVER(cuMemExportToShareableHandle);
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  return text_of(
      cuMemExportToShareableHandle_found(fd, mapping->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

const char* tessera_p2p_adopt(int device, int fd, int64_t bytes, CudaMapping* mapping) {
  TESSERA_DRIVER(cuMemImportFromShareableHandle);
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  size_t whole = 0;
  if (const char* const error = round_up(device, bytes, &whole); error != nullptr) return error;
  CUmemGenericAllocationHandle handle = 0;
  TESSERA_RETURN_IF(cuMemImportFromShareableHandle_found(
      &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return map(device, handle, whole, mapping);
}

const char* tessera_p2p_free(int device, const CudaMapping* mapping) {
  TESSERA_DRIVER(cuMemUnmap);
  TESSERA_DRIVER(cuMemAddressFree);
  TESSERA_DRIVER(cuMemRelease);
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  const char* const synchronized = text_of(cudaDeviceSynchronize());
  const auto address = reinterpret_cast<CUdeviceptr>(mapping->data);
  const auto bytes = static_cast<size_t>(mapping->bytes);
  TESSERA_RETURN_IF(cuMemUnmap_found(address, bytes));
  TESSERA_RETURN_IF(cuMemAddressFree_found(address, bytes));
  TESSERA_RETURN_IF(cuMemRelease_found(mapping->handle));
  return synchronized;
}

const char* tessera_p2p_register(int device, void* data, int64_t bytes) {
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  TESSERA_RETURN_IF(cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterMapped));
  void* on_device = nullptr;
  const char* error = text_of(cudaHostGetDevicePointer(&on_device, data, 0));
  if (error == nullptr && on_device != data)
    error = "registered host memory has another address on the device";
  if (error != nullptr) cudaHostUnregister(data);
  return error;
}

const char* tessera_p2p_unregister(int device, void* data) {
  const OnDevice on(device);
  TESSERA_RETURN_IF(on.error());
  return text_of(cudaHostUnregister(data));
}
