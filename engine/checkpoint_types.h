// What the engine's checkpoint files share: element types, bytes of tensors, agreement between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "checkpoint/element_type.h"
#include "comm/communicator.h"

namespace tessera {

/// Local.
at::ScalarType to_torch(checkpoint::ElementType type);
/// Local. Throws CheckpointError naming the tensor for a type that files cannot hold.
checkpoint::ElementType element_type_of(const at::Tensor& tensor, const std::string& name);

/// Local. The memory of a contiguous CPU tensor.
inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

/// Collective. Runs `function` and throws a CheckpointError on all ranks when it has failed on one: its message, with the
/// rank's number where not all have failed alike.
void on_all_ranks(comm::Communicator& comm, const char* label, const std::function<void()>& function);
/// Collective. Rank 0's answer on all ranks, or its CheckpointError.
std::string from_rank_0(comm::Communicator& comm, const char* label, const std::function<std::string()>& answer);

}  // namespace tessera
