// Streams tensors of a checkpoint, verified and converted, from its files to whoever writes them, in memory
// of a few buffers: one thread reads, the caller's converts and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/read/element_source.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

struct StreamedTensor {
  std::string name;  ///< for messages
  TensorId id;
  StoredTensor saved;
  DType type = DType::kFloat32;  ///< as written: floating-point tensors are converted
  /// As written.
  int64_t bytes() const { return saved.numel() * size_bytes(type); }
};

/// The tensor of this id, which must be there, as `type`; nullopt: as saved.
StreamedTensor streamed(const ElementSource& elements, std::string name, TensorId id,
                        std::optional<DType> type = std::nullopt);

struct StreamResult {
  int64_t bytes = 0;            ///< written
  int64_t num_overflowed = 0;   ///< finite elements that became infinite in the type written
  size_t first_overflowed = 0;  ///< index of the first tensor with such an element
};

/// Calls `write` with the bytes of the tensors in their order, in pieces; not for a tensor without elements.
/// Every block read is verified. Throws CheckpointError, and what `write` throws.
StreamResult stream_tensors(const ElementSource& elements, const std::vector<StreamedTensor>& tensors,
                            const std::function<void(size_t tensor, std::span<const std::byte>)>& write);

}  // namespace tessera::checkpoint
