// Hdf5File: reads datasets of HDF5 files that others wrote, by h5py or any program. (Our
// own checkpoints are read without HDF5.)
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
  int64_t bytes = 0;           ///< of the elements as read() gives them
  /// Byte of the file where the elements lie as read() would give them, one after the
  /// other: what can be mapped. Not there for chunked or compressed datasets, for
  /// big-endian ones, and for those kept in other files.
  std::optional<int64_t> offset;
};

/// Owns the open file. Thread-safe: calls of all files take turns (hdf5_library.h). All members are local and
/// throw CheckpointError naming file and dataset.
class Hdf5File {
 public:
  /// Also throws for what is no HDF5 file.
  explicit Hdf5File(const std::filesystem::path& path);
  Hdf5File(const Hdf5File&) = delete;
  Hdf5File& operator=(const Hdf5File&) = delete;
  ~Hdf5File();

  /// Paths of all datasets ("x", "train/x"), sorted.
  std::vector<std::string> names() const;
  /// Throws when there is no dataset of this path, its elements are of no DType (of any byte order), or
  /// it says to have far more of them than a file of this size can hold, compressed as they may be.
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
