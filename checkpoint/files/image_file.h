// Writes an HDF5 file from its image (hdf5_image.h) and its data, and hashes it in the same pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/hdf5/hdf5_image.h"
#include "checkpoint/manifest/manifest.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// Bytes of a dataset: in memory, brought there while they are written, or read in pieces.
struct SourceBytes {
  int64_t size = 0;
  /// Fills the destination with the bytes from `begin` on, in the order of the file; if it is there,
  /// acquire() is not called.
  std::function<void(int64_t begin, std::span<std::byte> destination)> read;
  std::function<std::span<const std::byte>()> acquire;  ///< gives the bytes, which stay until release()
  std::function<void()> release;

  SourceBytes() : SourceBytes(std::span<const std::byte>()) {}
  /// The memory is the caller's.
  SourceBytes(std::span<const std::byte> bytes)  // NOLINT(google-explicit-constructor)
      : size(static_cast<int64_t>(bytes.size())), acquire([bytes] { return bytes; }), release([] {}) {}
  SourceBytes(int64_t size, std::function<std::span<const std::byte>()> acquire,
              std::function<void()> release)
      : size(size), acquire(std::move(acquire)), release(std::move(release)) {}
};

/// `data[i]` is written at image.offsets[i]. Each block is hashed and then written while it is in the
/// processor's cache, without a copy. Returns name, bytes and hashes; the caller adds the datasets. Throws
/// DiskError, and what `data` throws.
FileRecord write_image_file(const Disk& disk, const std::filesystem::path& path, const Hdf5Image& image,
                            std::span<const SourceBytes> data);

}  // namespace tessera::checkpoint
