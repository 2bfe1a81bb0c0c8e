// The entry points of cuda.cu, which is compiled into the CUDA plugin and found by name
// (core/cuda_plugin.h), so that runs on the CPU load no CUDA library. Pointers inside the arguments are
// device memory; `stream` is a cudaStream_t. Each only enqueues work on the stream, whose device must be
// current, and returns null or CUDA's error text.
#pragma once

#include <cstdint>

#include "zero/kernels/passes.h"

namespace tessera::kernels {

inline constexpr int64_t kCudaMaxBlocks = 1024;
/// fp64 elements of scratch that squared_norm and lamb_norms need; the first two receive the result.
inline constexpr int64_t kCudaScratchNumel = 2 + 2 * kCudaMaxBlocks;

}  // namespace tessera::kernels

extern "C" {

const char* tessera_cuda_update(const tessera::kernels::Rule* rule, const tessera::kernels::UpdateArgs* args,
                                void* stream);

/// scratch[0] = sum of squares of the finite elements, scratch[1] = number of the others.
const char* tessera_cuda_squared_norm(const tessera::kernels::ConstSpan* grad, double* scratch, void* stream);

/// *result = index of the first inf or NaN, or -1.
const char* tessera_cuda_first_nonfinite(const tessera::kernels::ConstSpan* grad, int64_t* result,
                                         void* stream);

/// scratch[0] = sum of squares of the weights, scratch[1] = of the update.
const char* tessera_cuda_lamb_norms(const tessera::kernels::LambRule* rule,
                                    const tessera::kernels::UpdateArgs* args, double* scratch, void* stream);

const char* tessera_cuda_lamb_apply(const tessera::kernels::LambRule* rule, float step_size,
                                    const tessera::kernels::UpdateArgs* args, void* stream);
}
