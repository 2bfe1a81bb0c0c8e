// ForeignView: another program's checkpoint as if Tessera had written it: a manifest, and where each
// dataset's elements lie. So whoever reads a Checkpoint reads both alike.
//
// It is of one rank. Each parameter is a unit of its own; weights of trainable ones, and states, are fp32
// whatever the source's type is, and are converted as they are read. The source has no hashes: only what the
// format itself checks is verified.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/manifest/manifest.h"

namespace tessera::checkpoint {

/// Reads a foreign checkpoint by the names of datasets. Immutable; thread-safe.
class ForeignView {
 public:
  /// Throws CheckpointError for a checkpoint that a manifest cannot represent.
  explicit ForeignView(ForeignCheckpoint source);

  const ForeignCheckpoint& source() const { return source_; }
  const Manifest& manifest() const { return manifest_; }
  /// Fills `destination` from byte `begin` of a dataset of the manifest. Throws CheckpointError.
  void read(const DatasetRecord& dataset, int64_t begin, std::span<std::byte> destination) const;

 private:
  void add(std::vector<DatasetRecord>& datasets, const std::string& name, const ForeignTensor* tensor,
           DType type, const std::vector<int64_t>& shape);

  ForeignCheckpoint source_;
  ForeignFiles files_;
  Manifest manifest_;
  std::map<std::string, const ForeignTensor*, std::less<>> tensors_;  // null: zeros
};

}  // namespace tessera::checkpoint
