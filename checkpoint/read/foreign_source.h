// ForeignSource: the elements of what another program has saved, as if Tessera had written it.
//
// It is of one rank. Each parameter is a unit of its own; weights of trainable ones, and states, are fp32
// whatever the source's type is, and are converted as they are read. Only what the format itself checks is
// verified, and the hashes of Tessera's own safetensors.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/read/element_source.h"
#include "checkpoint/sharded/manifest.h"

namespace tessera::checkpoint {

/// Makes one count of those in `source` that contradict each other, and says so there. Throws CheckpointError
/// for a checkpoint that a manifest cannot represent.
Manifest manifest_of(ForeignCheckpoint& source);

/// Owns the source and its open files. Immutable; thread-safe.
class ForeignSource : public ElementSource {
 public:
  /// `manifest`: manifest_of(source).
  ForeignSource(ForeignCheckpoint source, std::shared_ptr<const Manifest> manifest);

  const ForeignCheckpoint& source() const { return source_; }

  Extent extent(const TensorId&, int64_t, int64_t most) const override { return {0, 0, most}; }
  void read(const TensorId& id, int64_t first, std::span<std::byte> destination) const override;
  void check(const TensorId& id, int64_t first, int64_t numel) const override;
  VerifyReport verify() const override;
  std::string digest() const override;

 private:
  std::optional<StoredTensor> find_whole(const TensorId& id) const override;
  /// nullptr: a state that this parameter does not have, of zeros.
  const ForeignTensor* tensor(const TensorId& id) const;
  std::string describe(const TensorId& id) const;

  ForeignCheckpoint source_;
  ForeignFiles files_;
};

}  // namespace tessera::checkpoint
