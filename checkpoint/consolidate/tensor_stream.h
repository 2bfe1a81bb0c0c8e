// Streams tensors of a checkpoint, verified and converted, from its files to whoever writes them, in memory
// of a few buffers: one thread reads, the caller's converts and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/read/batch_reader.h"
#include "checkpoint/read/reader.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

struct StreamedTensor {
  StoredTensor saved;
  DType type = DType::kFloat32;  ///< as written: floating-point tensors are converted
  /// Elements of the saved type.
  int64_t numel() const { return (saved.end - saved.begin) / size_bytes(saved.type); }
  /// As written.
  int64_t bytes() const { return numel() * size_bytes(type); }
};

/// What is read of a parameter: its weights, an optimizer state (of a trainable one); of a buffer.
StoredTensor saved_weights(const SavedLayout& layout, const SavedParameter& parameter);
StoredTensor saved_state(const SavedLayout& layout, const SavedParameter& parameter,
                         const std::string& state);
StoredTensor saved_buffer(const Checkpoint& checkpoint, const TensorRecord& record);

struct StreamResult {
  int64_t bytes = 0;            ///< written
  int64_t num_overflowed = 0;   ///< finite elements that became infinite in the type written
  size_t first_overflowed = 0;  ///< index of the first tensor with such an element
};

/// Calls `write` with the bytes of the tensors in their order, in pieces; not for a tensor without elements.
/// Every block read is verified. Throws CheckpointError, and what `write` throws.
StreamResult stream_tensors(const Checkpoint& checkpoint, const std::vector<StreamedTensor>& tensors,
                            const std::function<void(size_t tensor, std::span<const std::byte>)>& write);

}  // namespace tessera::checkpoint
