// The entry points of cuda.cu, which is compiled into the CUDA plugin and found by name
// (core/cuda_plugin.h), so that runs on the CPU load no CUDA library. Arrays of `count` elements are host
// memory, read during the call; pointers inside their elements are device memory, as are `result` and
// `scratch`, which has device::scratch_numel() fp64 elements for each segment; `stream` is a cudaStream_t.
// Each only enqueues work on the stream, whose device must be current, and returns null or CUDA's error text.
#pragma once

#include <cstdint>

#include "zero/kernels/adam_8bit_block.h"
#include "zero/kernels/passes.h"

extern "C" {

const char* tessera_cuda_update(const tessera::kernels::Rule* rules, const tessera::kernels::UpdateArgs* args,
                                int64_t count, void* stream);

/// results[i][0] = sum of squares of the finite elements of spans[i], results[i][1] = number of the others.
const char* tessera_cuda_squared_norms(const tessera::kernels::ConstSpan* spans, double* const* results,
                                       int64_t count, double* scratch, void* stream);

/// results[i][0] = sum of squares of the weights of segment i, results[i][1] = of its update.
const char* tessera_cuda_lamb_norms(const tessera::kernels::LambRule* rules,
                                    const tessera::kernels::UpdateArgs* args, double* const* results,
                                    int64_t count, double* scratch, void* stream);

const char* tessera_cuda_lamb_apply(const tessera::kernels::LambRule* rules, const float* step_sizes,
                                    const tessera::kernels::UpdateArgs* args, int64_t count, void* stream);

const char* tessera_cuda_adam_8bit(const tessera::kernels::Adam8bitArgs* parameter,
                                   const tessera::kernels::AdamRule* rule,
                                   const tessera::kernels::Codebook* first,
                                   const tessera::kernels::Codebook* second, void* stream);
}
