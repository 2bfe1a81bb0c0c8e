// Checkpoint: reads and verifies a checkpoint's data. Needs no HDF5: the manifest has all offsets.
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

/// Local. DIR/TAG; an empty tag means the one in `latest`. Throws CheckpointError when directory, `latest` or
/// tag does not exist; the message lists the tags that do.
std::filesystem::path find_checkpoint(const std::filesystem::path& directory, const std::string& tag);

/// Local. Reads and checks `folder`/manifest.json only. Throws CheckpointError, also when the folder was
/// renamed: its name must be the tag in the manifest.
Manifest read_manifest(const std::filesystem::path& folder);

/// Owns the manifest and the open files. Logically immutable; thread-safe.
class Checkpoint {
 public:
  /// Local. Reads the manifest; checks that the ranks' files exist and have their saved lengths. Throws
  /// CheckpointError.
  static Checkpoint open(const std::filesystem::path& directory, const std::string& tag = "");
  /// Local. The same without the check: files that are not read may be missing.
  static Checkpoint open_part(const std::filesystem::path& directory, const std::string& tag);
  Checkpoint(Checkpoint&&) noexcept;
  ~Checkpoint();

  const Manifest& manifest() const;
  const std::filesystem::path& path() const;  ///< DIR/TAG

  /// Local. Fills `destination` from byte `begin` of a dataset in the file of `rank`. Every block touched is
  /// read whole and verified. Throws CheckpointError naming file, block and dataset; `destination` is then
  /// undefined. Reading ranges in file order reads each block once.
  void read(int rank, const DatasetRecord& dataset, int64_t begin, std::span<std::byte> destination) const;
  /// Local. Reads and verifies the blocks that read() would read, each once in the lifetime of this object,
  /// and discards the data. Throws as read() does.
  void check(int rank, const DatasetRecord& dataset, int64_t begin, int64_t bytes) const;
  /// Local. A whole tensor's or blob's bytes.
  std::vector<std::byte> read_all(int rank, const DatasetRecord& dataset) const;
  /// Local. The dataset of that name; throws CheckpointError when the file has none.
  const DatasetRecord& dataset(int rank, const std::string& name) const;

  /// Bytes read from files since open(), without the manifest.
  int64_t bytes_read() const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
