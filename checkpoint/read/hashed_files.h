// HashedFiles: the files of a checkpoint of Tessera's. Only here is known which rank's file has an element.
//
// Each block of 1 MiB that is touched is read whole and compared with the manifest's hash. Needs no HDF5: the
// manifest has all offsets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/open_files.h"
#include "checkpoint/read/element_source.h"
#include "checkpoint/sharded/manifest.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"

namespace tessera::checkpoint {

/// Reads the files of `folder`. Owns those that are open. Logically immutable; thread-safe.
class HashedFiles : public ElementSource {
 public:
  /// Files are opened when they are read.
  HashedFiles(const std::filesystem::path& folder, std::shared_ptr<const Manifest> manifest);

  /// OpenFiles::keep().
  void open(int most) const { files_.keep(most); }
  /// Throws CheckpointError for a rank's file that is not there, or does not have its saved length.
  void check_sizes() const;

  Extent extent(const TensorId& id, int64_t first, int64_t most) const override;
  void read(const TensorId& id, int64_t first, std::span<std::byte> destination) const override;
  void check(const TensorId& id, int64_t first, int64_t numel) const override;
  VerifyReport verify() const override;
  std::string digest() const override { return content_digest(*manifest_); }

  /// The same of bytes of a dataset in the file of `rank`, from `begin` on.
  void read(int rank, const DatasetRecord& dataset, int64_t begin, std::span<std::byte> destination) const;
  void check(int rank, const DatasetRecord& dataset, int64_t begin, int64_t bytes) const;

 private:
  /// A recently read block, for ranges that begin or end within it. There are as many as datasets that are
  /// read alternately (weights and two states) have at the begin and end of what is read.
  struct CachedBlock {
    int rank = -1;
    int64_t block = -1;
    uint64_t used = 0;
    std::vector<std::byte> bytes;
  };
  struct Place {
    int rank = 0;
    const DatasetRecord* dataset = nullptr;
    int64_t begin = 0;  // element of the dataset
    int64_t numel = 0;  // that follow each other there
  };

  std::optional<StoredTensor> find_whole(const TensorId& id) const override;
  /// nullptr: the file has none of that name.
  const DatasetRecord* dataset_of_whole(const TensorId& id) const;
  Place place(const TensorId& id, int64_t first, int64_t most) const;
  void read_block(int rank, const DatasetRecord& dataset, int64_t block, std::span<std::byte> into) const;
  void copy_from_block(int rank, const DatasetRecord& dataset, int64_t block, int64_t skip,
                       std::span<std::byte> into) const;

  mutable OpenFiles<InputFile> files_;  // as in the manifest

  mutable std::mutex checked_mutex_;
  mutable std::vector<std::vector<bool>> checked_;  // by rank and block
  mutable std::vector<std::byte> scratch_;

  mutable std::mutex cache_mutex_;
  mutable std::array<CachedBlock, 6> cache_;
  mutable uint64_t clock_ = 0;
};

}  // namespace tessera::checkpoint
