// CsvMonitor: DeepSpeed's csv_monitor, one file for each scalar.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>

#include "core/files/line_file.h"
#include "core/log.h"
#include "monitor/monitor.h"

namespace tessera {

/// Writes scalars to CSV files: FOLDER/train_loss.csv for train/loss: a line "step,loss" (the name after its
/// last slash), then lines such as "10,0.31", byte for byte as DeepSpeed 0.19 writes them with Python's csv
/// module (lines end in CR LF). Only scalars. As in DeepSpeed names that differ in slashes and blanks alone
/// share a file, of which a warning tells, as of a name that is too long for a file. Owns the open files.
class CsvMonitor final : public Monitor {
 public:
  /// Creates the folder; a file is created, or truncated, with its first value. `resumed_after`: rows
  /// of later steps are removed from all files in the folder. `log`: where it is said which rows could not be
  /// read, and the warnings.
  CsvMonitor(std::filesystem::path folder, std::optional<int64_t> resumed_after, const Logger& log = {});

  std::string_view name() const override { return "csv_monitor"; }
  void scalars(int64_t step, const Scalars& scalars) override;
  void close(RunStatus /*status*/) override { files_.clear(); }

 private:
  void take_back(int64_t resumed_after);
  LineFile& file_of(const std::string& name);
  /// Says of a name what is wrong with its file, and once only.
  bool has_file(const std::string& name);

  std::filesystem::path folder_;
  Logger log_;
  std::map<std::string, LineFile> files_;      // by file name
  std::map<std::string, std::string> owners_;  // the first name of a file, by file name
  std::set<std::string> warned_;               // names
};

}  // namespace tessera
