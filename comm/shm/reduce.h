// The one pass of a reduction: reads the same range of all ranks' inputs and writes the sum.
#pragma once

#include <cstdint>
#include <utility>

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

/// Returns the output from element `numel` on. Null stays null.
ReduceOutput at_offset(const ReduceOutput& output, int64_t numel);
/// Where the slice of an all-reduce that `rank` sums begins, and its length: as even as can be.
std::pair<int64_t, int64_t> slice_of(int64_t numel, int rank, int size);

}  // namespace tessera::comm::shm
