// The CUDA side of kernels.cc: finds the plugin's entry points, runs them on torch's current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "zero/kernels/adam_8bit_block.h"
#include "zero/kernels/passes.h"

namespace tessera::kernels::cuda {

/// Each throws tessera::Error when CUDA reports an error or the plugin cannot be opened. `device` is where
/// the pointers live. `rows[i]`, in the device's memory, receives two fp64 for segment i.
void squared_norms(const std::vector<ConstSpan>& grads, const std::vector<double*>& rows, at::Device device);
void update(const std::vector<Rule>& rules, const std::vector<UpdateArgs>& args, at::Device device);
void lamb_norms(const std::vector<LambRule>& rules, const std::vector<UpdateArgs>& args,
                const std::vector<double*>& rows, at::Device device);
void lamb_apply(const std::vector<LambRule>& rules, const std::vector<float>& step_sizes,
                const std::vector<UpdateArgs>& args, at::Device device);
void adam_8bit(const Adam8bitArgs& parameter, const AdamRule& rule, const Codebook& first,
               const Codebook& second, at::Device device);

}  // namespace tessera::kernels::cuda
