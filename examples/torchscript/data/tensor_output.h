// TensorOutput: rows of named tensors, batch by batch, into a file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/formats/model_writer.h"
#include "core/files/disk.h"
#include "train/task/predictor.h"

namespace tessera::examples {

/// Owns the rows that are not written yet: all except those of the first tensor of a binary file. The file is
/// complete or absent. Used by one thread.
class TensorOutput {
 public:
  /// The name's ending says the format: .csv, or one of checkpoint::model_format_of
  /// (.safetensors, .h5, .pt …). Throws ConfigError.
  TensorOutput(std::filesystem::path path, int64_t num_rows);

  /// The next rows: contiguous CPU tensors (B, …), of the same names, types and row shapes each time.
  /// `origin` begins the message of the DataError where they are not. Throws DiskError.
  void add(const std::vector<std::pair<std::string, at::Tensor>>& rows, const std::string& origin);
  /// Is called after the last row. Returns what the file holds. Throws DiskError.
  std::vector<train::PredictedTensor> finish();

 private:
  struct Column {
    std::string name;
    std::vector<int64_t> shape;  // of a row
    at::ScalarType type;
    std::vector<at::Tensor> held;
  };
  void begin(const std::vector<std::pair<std::string, at::Tensor>>& rows);
  std::string csv() const;

  std::filesystem::path path_;
  int64_t num_rows_;
  bool is_csv_;
  std::vector<Column> columns_;
  Disk disk_;
  std::unique_ptr<checkpoint::ModelWriter> writer_;  // null: .csv
};

}  // namespace tessera::examples
