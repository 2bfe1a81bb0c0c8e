// Batch normalization whose parameters have 16 bits and whose running statistics are fp32.
#pragma once

namespace tessera {

/// From now on the process's aten::batch_norm accepts, on the CPU and on CUDA, parameters of another type
/// than the running statistics: it widens them to the statistics' type, which libtorch's kernels require. An
/// engine keeps buffers as the model has them, so its 16-bit models call it so. Other calls compute as
/// before. Thread-safe.
void let_batch_norm_widen_parameters();

}  // namespace tessera
