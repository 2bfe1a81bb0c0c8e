// What a stream is given: copies, sums, flags. Compiled with --fmad=false, so that an element's bits are the
// CPU's.
#include "comm/p2p/cuda_abi.h"
#include "comm/p2p/cuda_driver.h"
#include "comm/shm/reduce_rule.h"

namespace tessera::comm::p2p {
namespace {

constexpr int kThreads = 512;
/// A reduction reads over links between devices, which few processors fill; the others compute meanwhile.
constexpr int64_t kMaxBlocks = 64;

template <class Element>
__global__ void __launch_bounds__(kThreads) reduce_kernel(CudaReduction args) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.numel; i += stride)
    Element::reduce(args, i);
}

template <class In, class Out>
struct Floats {
  __device__ static void reduce(const CudaReduction& args, int64_t i) {
    shm::reduce_float<In, Out>(args.inputs, args.num_inputs, i, args.output, static_cast<float>(args.scale),
                               args.add);
  }
};
template <class T>
struct Numbers {
  __device__ static void reduce(const CudaReduction& args, int64_t i) {
    shm::reduce_number<T>(args.inputs, args.num_inputs, i, args.output, args.scale, args.add);
  }
};
struct Bools {
  __device__ static void reduce(const CudaReduction& args, int64_t i) {
    shm::reduce_bool(args.inputs, args.num_inputs, i, args.output, args.add);
  }
};

template <class Element>
void launch(const CudaReduction& args, cudaStream_t stream) {
  const int64_t blocks = (args.numel + kThreads - 1) / kThreads;
  reduce_kernel<Element>
      <<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(args);
}

template <class In>
void launch_floats(const CudaReduction& args, cudaStream_t stream) {
  if (args.output_dtype == DType::kBFloat16) return launch<Floats<In, shm::Bf16>>(args, stream);
  if (args.output_dtype == DType::kFloat16) return launch<Floats<In, shm::Fp16>>(args, stream);
  launch<Floats<In, shm::Fp32>>(args, stream);
}

void launch_reduction(const CudaReduction& args, cudaStream_t stream) {
  switch (args.dtype) {
    case DType::kFloat32: return launch_floats<shm::Fp32>(args, stream);
    case DType::kBFloat16: return launch_floats<shm::Bf16>(args, stream);
    case DType::kFloat16: return launch_floats<shm::Fp16>(args, stream);
    case DType::kFloat64: return launch<Numbers<double>>(args, stream);
    case DType::kInt64: return launch<Numbers<uint64_t>>(args, stream);
    case DType::kInt32: return launch<Numbers<uint32_t>>(args, stream);
    case DType::kInt16: return launch<Numbers<uint16_t>>(args, stream);
    case DType::kInt8:
    case DType::kUInt8: return launch<Numbers<uint8_t>>(args, stream);
    case DType::kBool: return launch<Bools>(args, stream);
    default: return;  // Communicator takes no other
  }
}

const char* query(cudaError_t result, int* is_done) {
  *is_done = result == cudaSuccess ? 1 : 0;
  if (result == cudaErrorNotReady) {
    cudaGetLastError();  // it is not the next call's
    return nullptr;
  }
  return text_of(result);
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace
}  // namespace tessera::comm::p2p

using namespace tessera::comm::p2p;

#define TESSERA_ON_DEVICE(device) \
  const OnDevice on(device);      \
  if (const char* const text = text_of(on.error()); text != nullptr) return text

// Non-blocking: the legacy default stream neither waits for it nor it for that. The highest priority: what it
// is given is short and others wait for it.
const char* tessera_p2p_make_stream(int device, void** stream) {
  TESSERA_ON_DEVICE(device);
  int lowest = 0, highest = 0;
  if (const char* const text = text_of(cudaDeviceGetStreamPriorityRange(&lowest, &highest))) return text;
  cudaStream_t made = nullptr;
  const char* const error = text_of(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest));
  *stream = made;
  return error;
}

const char* tessera_p2p_destroy_stream(int device, void* stream) {
  TESSERA_ON_DEVICE(device);
  return text_of(cudaStreamDestroy(stream_of(stream)));
}

const char* tessera_p2p_make_event(int device, void** event) {
  TESSERA_ON_DEVICE(device);
  cudaEvent_t made = nullptr;
  const char* const error = text_of(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  *event = made;
  return error;
}

const char* tessera_p2p_destroy_event(int device, void* event) {
  TESSERA_ON_DEVICE(device);
  return text_of(cudaEventDestroy(event_of(event)));
}

const char* tessera_p2p_record(int device, void* event, void* stream) {
  TESSERA_ON_DEVICE(device);
  return text_of(cudaEventRecord(event_of(event), stream_of(stream)));
}

const char* tessera_p2p_stream_wait_event(int device, void* stream, void* event) {
  TESSERA_ON_DEVICE(device);
  return text_of(cudaStreamWaitEvent(stream_of(stream), event_of(event), cudaEventWaitDefault));
}

const char* tessera_p2p_event_passed(int device, void* event, int* passed) {
  TESSERA_ON_DEVICE(device);
  return query(cudaEventQuery(event_of(event)), passed);
}

const char* tessera_p2p_stream_idle(int device, void* stream, int* idle) {
  TESSERA_ON_DEVICE(device);
  return query(cudaStreamQuery(stream_of(stream)), idle);
}

const char* tessera_p2p_copy(int device, void* stream, void* to, const void* from, int64_t bytes) {
  TESSERA_ON_DEVICE(device);
  return text_of(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_of(stream)));
}

const char* tessera_p2p_reduce(int device, void* stream, const CudaReduction* reduction) {
  TESSERA_ON_DEVICE(device);
  launch_reduction(*reduction, stream_of(stream));
  return text_of(cudaGetLastError());
}

const char* tessera_p2p_write32(int device, void* stream, void* address, uint32_t value) {
  TESSERA_DRIVER(cuStreamWriteValue32);
  TESSERA_ON_DEVICE(device);
  return text_of(cuStreamWriteValue32_found(stream_of(stream), reinterpret_cast<CUdeviceptr>(address), value,
                                            CU_STREAM_WRITE_VALUE_DEFAULT));
}

const char* tessera_p2p_wait64(int device, void* stream, const void* address, uint64_t value) {
  TESSERA_DRIVER(cuStreamWaitValue64);
  TESSERA_ON_DEVICE(device);
  return text_of(cuStreamWaitValue64_found(stream_of(stream), reinterpret_cast<CUdeviceptr>(address), value,
                                           CU_STREAM_WAIT_VALUE_GEQ));
}
