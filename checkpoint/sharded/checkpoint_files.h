// The HDF5 files of a checkpoint: a rank's, and model.h5. Each is written from its image (hdf5_image.h) and
// its data, and hashed in the same pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/sharded/manifest.h"
#include "core/dtype.h"
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

// Writes one rank's file of a checkpoint: the rank's slice of every unit, and this rank's own data.

/// This rank's slice of one unit, (shard_numel) each. The memory is the caller's.
struct UnitData {
  SourceBytes weights;              ///< fp32 master of a trainable unit; compute dtype of a frozen one
  std::vector<SourceBytes> states;  ///< fp32, in the order of the state names; none for a frozen unit
};

/// A tensor that is not sharded: contiguous, row-major. The memory is the caller's.
struct WholeTensor {
  std::string name;
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

/// Bytes of this rank only, such as the state of its random number generator. The memory is the caller's.
struct Blob {
  std::string name;
  std::span<const std::byte> data;
};

struct ShardContent {
  std::string tag;
  int rank = 0;
  const SavedLayout* layout = nullptr;
  std::vector<std::string> state_names;
  std::vector<UnitData> units;  ///< by unit
  std::vector<WholeTensor> tensors;
  std::vector<Blob> blobs;
};

/// Throws CheckpointError naming a name, shape or span that does not fit the layout. Called before any
/// file is created.
void check_content(const ShardContent& content);
/// Writes and hashes `path` in one pass over the memory, and syncs it if `disk` does. Throws
/// DiskError, and CheckpointError as check_content() does.
FileRecord write_shard_file(const Disk& disk, const std::filesystem::path& path, const ShardContent& content);

// model.h5: every parameter under its name (and each alias) as an HDF5 virtual dataset over the ranks' files,
// and every buffer as an external link, so that the sharded checkpoint opens as one model:
// h5py.File("model.h5")["encoder.weight"][:].
//
// HDF5 reads missing data of a source file as zeros, without an error. So this file is for inspection only;
// our readers use the offsets and hashes of the manifest.

/// `buffers`: names of rank 0's whole tensors. Throws DiskError, CheckpointError.
FileRecord write_model_file(const Disk& disk, const std::filesystem::path& path, const SavedLayout& layout,
                            const std::vector<std::string>& buffers);

}  // namespace tessera::checkpoint
