// Manifest: the contents of a checkpoint: saved layout, files with block hashes and datasets, and the
// engine's state. Stored as manifest.json; a folder without a valid one is not a checkpoint.
//
// Format: docs/checkpoint_format.md. JSON (RFC 8259) whose last member is the
// XXH3-128 of all bytes before its value.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint {

// SavedLayout: where the parameters of a checkpoint are in its files: the part of a zero::Layout that readers
// need. World size, unit size and version may have been different, so the offsets are stored and not
// recomputed.

struct SavedUnit {
  DType dtype = DType::kFloat32;  ///< compute dtype
  bool trainable = true;
  int64_t numel = 0;  ///< a multiple of the world size; rank r's file holds the r-th slice
  bool operator==(const SavedUnit&) const = default;
};

struct SavedParameter {
  std::string name;
  std::vector<int64_t> shape;
  int group = 0;                     ///< index of its param group
  std::vector<std::string> aliases;  ///< further names of the same (tied) parameter
  int unit = 0;
  int64_t offset = 0;  ///< first element within the unit; a multiple of 64 bytes of the unit's dtype

  int64_t numel() const;
  zero::Range range() const { return {offset, offset + numel()}; }
  bool operator==(const SavedParameter&) const = default;
};

/// Where elements of a parameter are: in its unit's weights and in each of its states alike.
struct SavedPlace {
  int rank = 0;
  int64_t begin = 0;  ///< element of the rank's slice of the unit
  int64_t numel = 0;  ///< elements of the parameter from there on that this rank has
};

struct SavedLayout {
  int world_size = 1;
  std::vector<SavedUnit> units;
  std::vector<SavedParameter> parameters;

  int num_units() const { return static_cast<int>(units.size()); }
  bool is_trainable(const SavedParameter& parameter) const {
    return units[static_cast<size_t>(parameter.unit)].trainable;
  }
  int64_t shard_numel(int unit) const { return units[unit].numel / world_size; }
  /// Where element `first` of the parameter of this index is, which it must have.
  SavedPlace place(int parameter, int64_t first) const;
  /// Type of the weights in the files: fp32 masters of trainable units, the compute dtype of frozen ones.
  DType weights_type(int unit) const { return units[unit].trainable ? DType::kFloat32 : units[unit].dtype; }
  bool operator==(const SavedLayout&) const = default;
};

/// `with_frozen` = false: without the units that are not trainable; the others are numbered anew.
SavedLayout saved_layout(const zero::Layout& layout, bool with_frozen = true);

// Datasets of a rank's file, each one-dimensional, (shard_numel).

/// "/master/unit_00003" for a trainable unit, fp32; "/parameter/unit_00003"
/// for a frozen one, its compute dtype.
std::string weights_dataset(const SavedLayout& layout, int unit);
/// "/exp_avg/unit_00003", fp32; of trainable units.
std::string state_dataset(const std::string& state_name, int unit);
/// Letters, digits and _, and not the name of another group of the file.
bool is_state_name(const std::string& name);

// DatasetList: the datasets of a rank's file, as the manifest has them.
//
// A file has a dataset for each unit and each optimizer state, and the files of all ranks (but rank 0's,
// which has the buffers too) have the same ones at the same places. So a list belongs to any number of files,
// in memory and in the manifest's text: both grow with units + ranks and not with their product.

/// A contiguous, row-major, little-endian tensor within a file.
struct DatasetRecord {
  std::string name;  ///< its HDF5 path
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  int64_t offset = 0;  ///< in the file's bytes
  int64_t bytes = 0;
  bool operator==(const DatasetRecord&) const = default;
};

/// Lists the datasets of a rank's file. Immutable, and cheap to copy: copies share the records. Thread-safe.
class DatasetList {
 public:
  DatasetList() : DatasetList(std::vector<DatasetRecord>()) {}
  /// Requires: the records are in the order of their offsets, and their names are unique.
  explicit DatasetList(std::vector<DatasetRecord> records);

  auto begin() const { return shared_->records.begin(); }
  auto end() const { return shared_->records.end(); }
  bool empty() const { return shared_->records.empty(); }
  /// nullptr when there is none. Valid as long as a copy of the list is.
  const DatasetRecord* find(std::string_view name) const;
  /// Bytes that a file with these datasets has at least.
  int64_t end_byte() const { return shared_->end_byte; }

  /// Whether both are copies of one list: an address, for tables.
  const void* identity() const { return shared_.get(); }
  bool operator==(const DatasetList& other) const {
    return shared_ == other.shared_ || shared_->records == other.shared_->records;
  }

 private:
  struct Shared {
    std::vector<DatasetRecord> records;
    std::map<std::string_view, const DatasetRecord*> by_name;
    int64_t end_byte = 0;
  };
  std::shared_ptr<const Shared> shared_;
};

// The names of a checkpoint's files, and of the datasets in them that are not a unit's.

inline constexpr std::string_view kModelFileName = "model.h5";
/// "rank_00003.h5".
std::string rank_file_name(int rank);

/// HDF5 path of a whole tensor, "/buffers/NAME", and of a blob, "/blobs/NAME" (see hdf5_path()).
std::string tensor_dataset(const std::string& name);
std::string blob_dataset(const std::string& name);
/// The inverse of blob_dataset().
std::string blob_name(std::string_view dataset);
bool is_tensor_dataset(std::string_view dataset);
bool is_blob_dataset(std::string_view dataset);

// The manifest.

inline constexpr int kFormatVersion = 2;  ///< written; 1 is read, too
inline constexpr size_t kMaxDims = 32;    ///< of a tensor; HDF5's limit
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

struct FileRecord {
  std::string name;  ///< "rank_00000.h5"; no folders
  int64_t bytes = 0;
  std::vector<uint64_t> block_hashes;  ///< see block_hashes.h
  DatasetList datasets;                ///< none for model.h5
  bool operator==(const FileRecord&) const = default;
};

/// A tensor that is not sharded (a buffer of the model), in rank 0's file.
struct TensorRecord {
  std::string name;  ///< in the model
  std::string dataset;
  bool operator==(const TensorRecord&) const = default;
};

struct Manifest {
  int version = kFormatVersion;  ///< of its text
  std::string tag;
  int stage = 0;
  SavedLayout layout;
  std::vector<std::string> state_names;  ///< "exp_avg", …
  std::vector<FileRecord> files;         ///< rank 0's, rank 1's, …; then model.h5
  std::vector<TensorRecord> tensors;
  nlohmann::json state =
      nlohmann::json::object();  ///< the engine's: counters, schedule, config, client state

  int world_size() const { return layout.world_size; }
  const FileRecord& rank_file(int rank) const { return files[rank]; }
  /// nullptr when there is none.
  const TensorRecord* find_tensor(std::string_view name) const;
  /// Bytes of all files the manifest lists.
  int64_t total_bytes() const;

  /// The text of manifest.json. Throws CheckpointError for a state that JSON cannot hold (a number
  /// that is not finite, text that is not UTF-8), naming the key.
  std::string to_text() const;
  /// The inverse. Checks types, ranges, sums, names and consistency, so that the result can be used
  /// without further checks. Throws CheckpointError naming `source`, key, found and expected value; for a
  /// newer format version the message says so.
  static Manifest parse(std::string_view text, const std::string& source);
  bool operator==(const Manifest&) const = default;
};

/// Throws CheckpointError for a state that to_text() cannot write.
void check_state(const nlohmann::json& state);

/// A file's record to text, for sending it to rank 0.
std::string file_record_to_text(const FileRecord& record);
/// Equal for checkpoints of the same state and elements. Of model.h5 it knows nothing.
std::string content_digest(const Manifest& manifest);
/// file_record_to_text()'s inverse, for the records of many ranks: equal lists of datasets are read once, and
/// shared.
class FileRecordReader {
 public:
  /// Throws as Manifest::parse does.
  FileRecord parse(const std::string& text, const std::string& source);

 private:
  std::string datasets_text_;  // of the record before
  DatasetList datasets_;
};

// The begin and the end of a manifest's text, the same in all format versions: format name and version, and
// the digest.

inline constexpr std::string_view kFormatName = "tessera-checkpoint";
/// The last member of a file's record.
inline constexpr std::string_view kDatasetsKey = ", \"datasets\": ";
inline constexpr std::string_view kDigestKey =
    "\"digest\": \"";  // the digest's 32 digits follow: of all bytes up to here
inline constexpr std::string_view kDigestEnd = "\"\n}\n";

/// Appends the digest. `text` is everything before it, including the comma.
std::string seal_manifest(std::string text);

}  // namespace tessera::checkpoint
