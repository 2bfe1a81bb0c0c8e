// The passes on raw pointers: what kernels.cc asks of the CPU and of CUDA. No libtorch here, so that the CPU
// loops compile with their own flags and the CUDA kernels with nvcc alone.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "zero/kernels/sums.h"
#include "zero/kernels/update_rules.h"

namespace tessera::kernels {

/// (numel) elements of one of fp32, bf16, fp16; borrowed.
struct ConstSpan {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t numel = 0;
};

/// Segment on raw pointers; borrowed.
struct UpdateArgs {
  int64_t numel = 0;
  float* master = nullptr;
  float* state0 = nullptr;  ///< null beyond the rule's kNumStates
  float* state1 = nullptr;
  float* state2 = nullptr;
  const void* grad = nullptr;
  void* param = nullptr;  ///< null: master is the parameter
  DType grad_dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;
  float grad_scale = 1;
};

/// fp32 value of element i; other dtypes never get here (kernels.cc checks).
TESSERA_HD float load_element(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kBFloat16) return float_of_bf16(static_cast<const uint16_t*>(data)[i]);
  if (dtype == DType::kFloat16) return float_of_fp16(static_cast<const uint16_t*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

TESSERA_HD void store_element(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::kBFloat16) {
    static_cast<uint16_t*>(data)[i] = bf16_of_float(value);
  } else if (dtype == DType::kFloat16) {
    static_cast<uint16_t*>(data)[i] = fp16_of_float(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

/// One thread's work; kernels.cc cuts it into chunks. Sums are over lanes fixed by the index in the span.
namespace cpu {
NormPart squared_norm(const ConstSpan& grad);
void update(const Rule& rule, const UpdateArgs& args);
LambPart lamb_norms(const LambRule& rule, const UpdateArgs& args);
void lamb_apply(const LambRule& rule, float step_size, const UpdateArgs& args);
}  // namespace cpu

}  // namespace tessera::kernels
