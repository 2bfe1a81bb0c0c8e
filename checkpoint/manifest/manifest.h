// Manifest: the contents of a checkpoint: saved layout, files with block hashes and datasets, and the
// engine's state. Stored as manifest.json; a folder without a valid one is not a checkpoint.
//
// Format: docs/checkpoint_format.md. JSON (RFC 8259) whose last member is the
// XXH3-128 of all bytes before its value.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest/dataset_list.h"
#include "checkpoint/manifest/saved_layout.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

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

/// A file's record to text, for sending it to rank 0.
std::string file_record_to_text(const FileRecord& record);
/// The inverse, for the records of many ranks: equal lists of datasets are read once, and shared.
class FileRecordReader {
 public:
  /// Throws as Manifest::parse does.
  FileRecord parse(const std::string& text, const std::string& source);

 private:
  std::string datasets_text_;  // of the record before
  DatasetList datasets_;
};

}  // namespace tessera::checkpoint
