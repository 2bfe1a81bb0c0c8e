// Checkpoint: reads a checkpoint's data, verified. Needs no HDF5: the manifest says where data lies.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "core/disk.h"

namespace tessera::checkpoint {

/// Local. DIR/TAG of the tag, or of `latest` for an empty one. Throws CheckpointError for a directory,
/// `latest` or tag that is not there, and lists the tags that are.
std::filesystem::path find_checkpoint(const std::filesystem::path& directory, const std::string& tag);

/// Local. Reads and checks `folder`/manifest.json, and nothing else. Throws CheckpointError, also for a
/// folder that was renamed: the manifest has the tag.
Manifest read_manifest(const std::filesystem::path& folder);

/// Immutable but for its counters; thread-safe.
class Checkpoint {
 public:
  /// Local. Reads the manifest; checks that the ranks' files are there and as long
  /// as they were. Throws CheckpointError.
  static Checkpoint open(const std::filesystem::path& directory, const std::string& tag = "");
  Checkpoint(Checkpoint&&) noexcept;
  ~Checkpoint();

  const Manifest& manifest() const;
  const std::filesystem::path& path() const;  ///< DIR/TAG

  /// Local. Fills `destination` from byte `begin` of a dataset in the file of `rank`. Every block touched is
  /// read whole and verified. Throws CheckpointError naming file, block and dataset; `destination` then holds
  /// anything. Reading ranges in the order of the file touches each block once.
  void read(int rank, const DatasetRecord& dataset, int64_t begin, std::span<std::byte> destination) const;
  /// Local. Reads and verifies the same blocks as read() would, each once in the life of this object, and
  /// keeps nothing. Throws as read() does.
  void check(int rank, const DatasetRecord& dataset, int64_t begin, int64_t bytes) const;
  /// Local. A whole tensor's or blob's bytes.
  std::vector<std::byte> read_all(int rank, const DatasetRecord& dataset) const;
  /// Local. The dataset of that name; throws CheckpointError when the file has none.
  const DatasetRecord& dataset(int rank, const std::string& name) const;

  /// Bytes read from files since open(), the manifest not counted.
  int64_t bytes_read() const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
