// The CUDA kernels. Elements: one grid-stride loop over the same rules as the CPU; compiled with
// --fmad=false, so that an element's bits are the CPU's. Sums: every thread adds its elements in order in
// fp64, a block adds its threads in a fixed tree, a second kernel adds the blocks the same way; the grid
// depends on the number of elements alone, so the bits depend on nothing else (no atomics, not the device).
#include <cuda_runtime.h>

#include "zero/kernels/cuda_abi.h"

namespace tessera::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kElementsPerThread = 8;  // aimed at, until the grid is at its largest

struct Pair {
  double first;
  double second;
};

int num_blocks(int64_t numel) {
  const int64_t per_block = kThreads * kElementsPerThread;
  const int64_t blocks = (numel + per_block - 1) / per_block;
  return static_cast<int>(blocks < kCudaMaxBlocks ? blocks : kCudaMaxBlocks);
}

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

__device__ int64_t first_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64_t index_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

template <class RuleType>
__global__ void update_kernel(RuleType rule, UpdateArgs args) {
  for (int64_t i = first_index(); i < args.numel; i += index_stride()) {
    const float grad = load_element(args.grad, args.grad_dtype, i) * args.grad_scale;
    float s0 = 0;
    float s1 = 0;
    if constexpr (RuleType::kNumStates > 0) s0 = args.state0[i];
    if constexpr (RuleType::kNumStates > 1) s1 = args.state1[i];
    const float weight = rule.step(args.master[i], grad, s0, s1);
    args.master[i] = weight;
    if constexpr (RuleType::kNumStates > 0) args.state0[i] = s0;
    if constexpr (RuleType::kNumStates > 1) args.state1[i] = s1;
    if (args.param != nullptr) store_element(args.param, args.param_dtype, i, weight);
  }
}

/// Adds the block's pairs in a fixed tree; every thread of the block calls it, *out is written by one.
__device__ void reduce_block(Pair mine, Pair* out) {
  __shared__ Pair pairs[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  pairs[thread] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      pairs[thread].first += pairs[thread + half].first;
      pairs[thread].second += pairs[thread + half].second;
    }
    __syncthreads();
  }
  if (thread == 0) *out = pairs[0];
}

__device__ double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

__global__ void squared_norm_kernel(ConstSpan grad, Pair* partials) {
  Pair mine{0, 0};
  for (int64_t i = first_index(); i < grad.numel; i += index_stride()) {
    const float x = load_element(grad.data, grad.dtype, i);
    if (is_finite(x)) {
      mine.first += square(x);
    } else {
      mine.second += 1;
    }
  }
  reduce_block(mine, partials + blockIdx.x);
}

__global__ void lamb_norms_kernel(LambRule rule, UpdateArgs args, Pair* partials) {
  Pair mine{0, 0};
  for (int64_t i = first_index(); i < args.numel; i += index_stride()) {
    const float grad = load_element(args.grad, args.grad_dtype, i) * args.grad_scale;
    const float weight = args.master[i];
    float exp_avg = args.state0[i];
    float exp_avg_sq = args.state1[i];
    rule.advance(grad, exp_avg, exp_avg_sq);
    args.state0[i] = exp_avg;
    args.state1[i] = exp_avg_sq;
    mine.first += square(weight);
    mine.second += square(rule.direction(weight, exp_avg, exp_avg_sq));
  }
  reduce_block(mine, partials + blockIdx.x);
}

__global__ void lamb_apply_kernel(LambRule rule, float step_size, UpdateArgs args) {
  for (int64_t i = first_index(); i < args.numel; i += index_stride()) {
    float weight = args.master[i];
    weight = weight - step_size * rule.direction(weight, args.state0[i], args.state1[i]);
    args.master[i] = weight;
    if (args.param != nullptr) store_element(args.param, args.param_dtype, i, weight);
  }
}

/// One block.
__global__ void sum_partials_kernel(const Pair* partials, int num_partials, Pair* result) {
  Pair mine{0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < num_partials; i += kThreads) {
    mine.first += partials[i].first;
    mine.second += partials[i].second;
  }
  reduce_block(mine, result);
}

/// `*result` starts as -1, the largest of unsigned numbers; a minimum does not
/// depend on the order it is taken in.
__global__ void first_nonfinite_kernel(ConstSpan grad, unsigned long long* result) {
  for (int64_t i = first_index(); i < grad.numel; i += index_stride()) {
    if (is_finite(load_element(grad.data, grad.dtype, i))) continue;
    atomicMin(result, static_cast<unsigned long long>(i));
    return;  // this thread's later elements have larger indices
  }
}

/// Launches a kernel that writes one Pair a block, then adds them into scratch[0..1].
template <class Launch>
const char* sum_pairs(int64_t numel, double* scratch, cudaStream_t stream, const Launch& launch) {
  auto* result = reinterpret_cast<Pair*>(scratch);
  Pair* partials = result + 1;
  const int blocks = num_blocks(numel);
  launch(blocks, partials);
  if (const char* error = launch_error()) return error;
  sum_partials_kernel<<<1, kThreads, 0, stream>>>(partials, blocks, result);
  return launch_error();
}

}  // namespace
}  // namespace tessera::kernels

namespace tk = tessera::kernels;

const char* tessera_cuda_update(const tk::Rule* rule, const tk::UpdateArgs* args, void* stream) {
  if (args->numel == 0) return nullptr;
  std::visit(
      [&](const auto& chosen) {
        tk::update_kernel<<<tk::num_blocks(args->numel), tk::kThreads, 0,
                            static_cast<cudaStream_t>(stream)>>>(chosen, *args);
      },
      *rule);
  return tk::launch_error();
}

const char* tessera_cuda_squared_norm(const tk::ConstSpan* grad, double* scratch, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  return tk::sum_pairs(grad->numel, scratch, cuda_stream, [&](int blocks, tk::Pair* partials) {
    if (blocks > 0) tk::squared_norm_kernel<<<blocks, tk::kThreads, 0, cuda_stream>>>(*grad, partials);
  });
}

const char* tessera_cuda_first_nonfinite(const tk::ConstSpan* grad, int64_t* result, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaMemsetAsync(result, 0xFF, sizeof(int64_t), cuda_stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (grad->numel == 0) return nullptr;
  tk::first_nonfinite_kernel<<<tk::num_blocks(grad->numel), tk::kThreads, 0, cuda_stream>>>(
      *grad, reinterpret_cast<unsigned long long*>(result));
  return tk::launch_error();
}

const char* tessera_cuda_lamb_norms(const tk::LambRule* rule, const tk::UpdateArgs* args, double* scratch,
                                    void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  return tk::sum_pairs(args->numel, scratch, cuda_stream, [&](int blocks, tk::Pair* partials) {
    if (blocks > 0) tk::lamb_norms_kernel<<<blocks, tk::kThreads, 0, cuda_stream>>>(*rule, *args, partials);
  });
}

const char* tessera_cuda_lamb_apply(const tk::LambRule* rule, float step_size, const tk::UpdateArgs* args,
                                    void* stream) {
  if (args->numel == 0) return nullptr;
  tk::lamb_apply_kernel<<<tk::num_blocks(args->numel), tk::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      *rule, step_size, *args);
  return tk::launch_error();
}
