// The CUDA side of kernels.cc: finds the plugin's entry points, runs them on torch's current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "zero/kernels/passes.h"

namespace tessera::kernels::cuda {

/// Each throws tessera::Error when CUDA reports an error or the plugin cannot be opened. `device` is where
/// the pointers live. first_nonfinite and lamb_norms wait for the stream.
/// (2) fp64 on the device: sum of squares of the finite elements, number of the others.
at::Tensor squared_norm(const ConstSpan& grad, at::Device device);
int64_t first_nonfinite(const ConstSpan& grad, at::Device device);
void update(const Rule& rule, const UpdateArgs& args, at::Device device);
LambPart lamb_norms(const LambRule& rule, const UpdateArgs& args, at::Device device);
void lamb_apply(const LambRule& rule, float step_size, const UpdateArgs& args, at::Device device);

}  // namespace tessera::kernels::cuda
