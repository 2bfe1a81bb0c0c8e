// What the engine's checkpoint files share: element types, bytes of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>

#include "checkpoint/element_type.h"

namespace tessera {

/// Local.
at::ScalarType to_torch(checkpoint::ElementType type);
/// Local. Throws CheckpointError naming the tensor for a type that files cannot hold.
checkpoint::ElementType element_type_of(const at::Tensor& tensor, const std::string& name);

/// Local. The memory of a contiguous CPU tensor.
inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace tessera
