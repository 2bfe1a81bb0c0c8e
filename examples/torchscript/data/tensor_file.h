// TensorFile: named tensors of a .safetensors or HDF5 file, shared between the
// ranks of a host. Without libtorch.
//
// One copy of the data on a host.
// What lies in the file as it is needed is mapped: all ranks of a host read the same pages of the page
// cache, and data larger than the memory come and go with it. That holds for safetensors and for
// contiguous HDF5 datasets, whose elements h5py aligns to nothing; so rows are copied out as bytes. What
// has to be decoded (chunked, compressed or big-endian datasets) is read into the rank's own memory. A
// mapped file must not be shortened during a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tessera::examples {

/// One tensor. Read-only; shares the ownership of its bytes.
struct StoredTensor {
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::shared_ptr<const std::byte> data;  ///< row by row, little-endian; not always aligned for its type
  bool mapped = false;                    ///< false: a copy of this process's own
};

/// Owns the open file; what tensor() returned outlives it. Thread-safe. Throws
/// DataError naming file and tensor.
class TensorFile {
 public:
  /// Opens the file by the name's ending: .safetensors, .h5 or .hdf5. Checks the header of a safetensors
  /// file.
  explicit TensorFile(const std::filesystem::path& path);
  ~TensorFile();

  /// In HDF5 a name is a path ("x", "train/x"). Throws when there is none of
  /// that name, with the names there are.
  StoredTensor tensor(const std::string& name) const;

 private:
  struct Source;
  StoredTensor find(const std::string& name) const;
  StoredTensor take(const std::string& name, StoredTensor tensor, int64_t bytes,
                    std::optional<int64_t> offset,
                    const std::function<void(std::span<std::byte>)>& read) const;

  std::filesystem::path path_;
  std::unique_ptr<Source> source_;
};

}  // namespace tessera::examples
