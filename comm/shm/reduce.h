// The one pass of a reduction: reads the same range of all ranks' inputs and writes the sum.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace tessera::comm::shm {

/// Says where a reduction's result goes, and how: output = scale * sum [+ output].
struct ReduceOutput {
  void* data = nullptr;  ///< (numel) of `dtype`; may be one of the inputs
  DType dtype = DType::kFloat32;
  double scale = 1;  ///< floating point only
  bool add = false;
};

/// Says what is summed up and where the sum goes. Owns nothing.
struct Reduction {
  DType dtype = DType::kFloat32;        ///< of the inputs
  const void* const* inputs = nullptr;  ///< [num_inputs], each (numel) elements; in rank order
  int num_inputs = 0;
  int64_t numel = 0;
  ReduceOutput output;
};

/// The sum of fp32, bf16 and fp16 is formed in fp32 in the inputs' order, and rounded once; IEEE
/// operations one by one, so every instruction set gives the same bits. fp64 in fp64; integers wrap; bool is
/// "or". Inputs and output have one dtype, except that fp32, bf16 and fp16 may be mixed.
void reduce(const Reduction& reduction);

}  // namespace tessera::comm::shm
