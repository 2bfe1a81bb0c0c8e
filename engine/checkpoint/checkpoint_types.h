// Types and bytes of tensors, for the engine's checkpoint code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>

#include "comm/torch_dtype.h"

namespace tessera {

/// Throws CheckpointError naming the tensor for one that files cannot hold: quantized, sparse, without
/// values.
DType dtype_of(const at::Tensor& tensor, const std::string& name);

/// The memory of a contiguous CPU tensor.
inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace tessera
