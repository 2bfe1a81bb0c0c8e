// Hdf5Builder: computes the layout and the metadata of an HDF5 file; the caller writes the data.
//
// HDF5 chooses every offset. Each dataset is contiguous, allocated early and never filled, so the library
// writes metadata only. It writes to an anonymous file in memory, where the data is a hole that takes no
// memory. The result is the metadata and the offset of each dataset. The real file is then written through
// core/files/disk.h in one pass and in large pieces, and hashed in the same pass. So fault-injection tests
// reach each write, and a full disk is reported as an error of the write that met it.
//
// A builder holds the library's lock during its lifetime (hdf5_library.h). HDF5 prints no errors; they are
// thrown as CheckpointError.
//
// Source: "HDF5 File Format Specification Version 3.0"; types as h5py names them (bool is an enum {FALSE,
// TRUE} of int8; bf16 a 16-bit float with 8 bits of exponent, which h5py reads as float32).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

struct Hdf5Attribute {
  std::string name;
  std::variant<int64_t, std::string> value;
};

struct Hdf5Dataset {
  std::string path;  ///< "/master/unit_00003"; missing groups are created
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<Hdf5Attribute> attributes;
};

/// Whether HDF5 has a type whose readers see the numbers that the elements are. Elements of other
/// types are laid out as unsigned integers of their size.
bool is_hdf5_type(DType type);

/// Maps consecutive elements of a virtual dataset to those of a one-dimensional dataset in another file.
struct Hdf5Source {
  std::string file;  ///< relative to the folder of the file being built
  std::string dataset;
  int64_t dataset_numel = 0;
  int64_t dataset_begin = 0;
  int64_t begin = 0;  ///< in the virtual dataset, counted row by row
  int64_t numel = 0;
};

/// A file's bytes except the data of its datasets.
struct Hdf5Image {
  struct Piece {
    int64_t offset = 0;
    std::string bytes;
  };
  int64_t file_bytes = 0;
  std::vector<Piece> metadata;   ///< by offset; bytes in neither these nor a dataset are zero
  std::vector<int64_t> offsets;  ///< by call of add(); byte of the first element (0 if there is none)
};

enum class Hdf5Readers {
  kSince1_8,
  kSince1_10,  ///< needed by virtual datasets
};

/// The path of a tensor in a group ("/", "/buffers/"). Its name is escaped to one link: '/' becomes "%2F",
/// '%'
/// "%25", and the name "." "%2E".
std::string hdf5_path(std::string_view group, std::string_view name);

/// Not thread-safe; builders in other threads wait for the lock. Members throw CheckpointError naming
/// `purpose` and path.
class Hdf5Builder {
 public:
  /// `purpose` names the file in errors: "rank_00000.h5".
  Hdf5Builder(std::string purpose, Hdf5Readers readers);
  Hdf5Builder(const Hdf5Builder&) = delete;
  Hdf5Builder& operator=(const Hdf5Builder&) = delete;
  ~Hdf5Builder();

  /// A dataset whose data the caller writes.
  void add(const Hdf5Dataset& dataset);
  /// A dataset whose elements are in other files; elements that no source covers read as zero.
  void add_virtual(const Hdf5Dataset& dataset, std::span<const Hdf5Source> sources);
  /// A hard link: another name of a dataset that add() or add_virtual() made.
  void add_link(const std::string& existing, const std::string& path);
  /// An external link to a dataset of another file. `file` is relative to the folder of the file being built.
  void add_external_link(const std::string& file, const std::string& dataset, const std::string& path);
  /// The group or dataset must exist.
  void set_attribute(const std::string& path, const Hdf5Attribute& attribute);
  /// Ends the file. Call it once, last.
  Hdf5Image finish();

 private:
  struct Handles;
  std::string purpose_;
  std::unique_ptr<Handles> handles_;
};

}  // namespace tessera::checkpoint
