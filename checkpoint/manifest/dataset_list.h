// DatasetList: the datasets of a rank's file, as the manifest has them.
//
// A file has a dataset for each unit and each optimizer state, and the files of all ranks (but rank 0's,
// which has the buffers too) have the same ones at the same places. So a list belongs to any number of files,
// in memory and in the manifest's text: both grow with units + ranks and not with their product.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

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

}  // namespace tessera::checkpoint
