// Hdf5File: reads datasets of HDF5 files written by other programs, such as h5py. (Checkpoints are read
// without HDF5.)
//
// A dataset's elements may be in other files (virtual datasets, external storage, external links), or nowhere
// (never written). HDF5 gives zeros, or the fill value, for elements that it does not find, and it would read
// any file that such a dataset names. So find() refuses these by name before it reads data: what is read is
// in the file that was opened, and was written there. A filter that is not HDF5's own would be code from a
// plugin; it is refused, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

struct Hdf5Stored {
  std::string name;
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;  ///< [] for a scalar
  int64_t bytes = 0;           ///< of the elements as read() returns them
  /// Byte of the file where the elements begin, if they are stored as read() returns them, so that they can
  /// be mapped. Unset for datasets that are chunked, compressed or big-endian.
  std::optional<int64_t> offset;
};

/// Owns the open file. Thread-safe: one lock serializes the calls on all files (hdf5_library.h). All members
/// are local and throw CheckpointError naming file and dataset.
class Hdf5File {
 public:
  /// Also throws when the file is not an HDF5 file.
  explicit Hdf5File(const std::filesystem::path& path);
  Hdf5File(const Hdf5File&) = delete;
  Hdf5File& operator=(const Hdf5File&) = delete;
  ~Hdf5File();

  /// Paths of all datasets ("x", "train/x"), sorted.
  std::vector<std::string> names() const;
  /// Whether the file has something of this path. find() throws unless it is a dataset.
  bool has(const std::string& name) const;
  /// Throws when there is no such dataset, its element type is not a DType (in either byte order), its
  /// shape has far more elements than a file of this size can hold, even compressed, or its elements are not
  /// all in this file.
  Hdf5Stored find(const std::string& name) const;
  /// Fills `destination`, which has stored.bytes, with the elements row by row, little-endian.
  void read(const Hdf5Stored& stored, std::span<std::byte> destination) const;

 private:
  struct Handles;
  std::filesystem::path path_;
  int64_t file_bytes_ = 0;
  std::unique_ptr<Handles> handles_;
};

}  // namespace tessera::checkpoint
