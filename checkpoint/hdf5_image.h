// Hdf5Builder: lays out an HDF5 file without its data, so that we write the data ourselves.
//
// [Note: HDF5 for structure, our own writes for data]
// HDF5 decides where everything lies: each dataset is contiguous, allocated at once and never filled, so the
// library writes metadata only. It writes that to an anonymous file in memory, where the data's room is a
// hole that costs nothing. What comes back is the metadata and each dataset's offset; the real file is then
// written in one pass through core/disk.h, in large pieces, hashed on the way, each operation probed, and a
// full disk is noticed where it can be reported.
//
// A builder holds the library's lock as long as it lives (hdf5_library.h). HDF5's own error
// printing is off: errors are CheckpointErrors.
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
  std::string path;  ///< "/master/unit_00003"; groups on the way are made
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<Hdf5Attribute> attributes;
};

/// Consecutive elements of a virtual dataset that are those of a one-dimensional dataset in another file.
struct Hdf5Source {
  std::string file;  ///< relative to the folder of the file being built
  std::string dataset;
  int64_t dataset_numel = 0;
  int64_t dataset_begin = 0;
  int64_t begin = 0;  ///< in the virtual dataset, counted row by row
  int64_t numel = 0;
};

/// A file's bytes, but for the data of its datasets.
struct Hdf5Image {
  struct Piece {
    int64_t offset = 0;
    std::string bytes;
  };
  int64_t file_bytes = 0;
  std::vector<Piece> metadata;  ///< by offset; what neither these nor a dataset covers is zero
  std::vector<int64_t>
      offsets;  ///< by what add() returned; byte of the first element (0 for a dataset without elements)
};

enum class Hdf5Readers {
  kSince1_8,
  kSince1_10,  ///< needed by virtual datasets
};

/// Local. A tensor's name as one link name of HDF5: '/' and '%' become "%2F" and
/// "%25", and a lone "." becomes "%2E".
std::string hdf5_name(std::string_view name);

/// Not thread-safe; builders of other threads wait. All members are local and throw
/// CheckpointError naming `purpose` and path.
class Hdf5Builder {
 public:
  /// `purpose` names the file in errors: "rank_00000.h5".
  Hdf5Builder(std::string purpose, Hdf5Readers readers);
  Hdf5Builder(const Hdf5Builder&) = delete;
  Hdf5Builder& operator=(const Hdf5Builder&) = delete;
  ~Hdf5Builder();

  /// A dataset whose data the caller writes. Returns its index in Hdf5Image::offsets.
  int add(const Hdf5Dataset& dataset);
  /// A dataset that shows elements of other files; what no source covers reads as zero.
  void add_virtual(const Hdf5Dataset& dataset, std::span<const Hdf5Source> sources);
  /// A further name (hard link) of what add() or add_virtual() made.
  void add_link(const std::string& existing, const std::string& path);
  /// A name that leads to a dataset of another file, relative to the folder of the file being built.
  void add_external_link(const std::string& file, const std::string& dataset, const std::string& path);
  /// To a group or dataset there is.
  void set_attribute(const std::string& path, const Hdf5Attribute& attribute);
  /// Ends the file; to be called once, as the last.
  Hdf5Image finish();

 private:
  struct Handles;
  std::string purpose_;
  std::unique_ptr<Handles> handles_;
};

}  // namespace tessera::checkpoint
