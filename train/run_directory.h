// RunDirectory: the files a run leaves behind, OUTPUT_DIR/NAME/ with
//   config.json       every key with the value it had
//   metrics.jsonl     one JSON object a line, as training goes
//   all_results.json  the final results, under Hugging Face's names; only there when the run came to its end
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include <nlohmann/json_fwd.hpp>

namespace tessera::train {

/// Writes from one rank (rank 0). Owns the open metrics file. Not thread-safe.
class RunDirectory {
 public:
  /// Local. Creates the folder, removes an earlier run's results from it and starts metrics.jsonl anew. Throws
  /// ConfigError naming the folder and the reason when it cannot be written.
  explicit RunDirectory(const std::filesystem::path& folder);
  /// Local. The same for a run that goes on: what is in metrics.jsonl stays.
  static RunDirectory continued(const std::filesystem::path& folder) { return RunDirectory(folder, /*anew=*/false); }

  const std::filesystem::path& folder() const { return folder_; }
  /// Local. Replaces a file as a whole: who reads it sees the old content or the new one. Throws tessera::Error.
  void write(const std::string& name, const std::string& content) const;
  /// Local. Appends one record and hands it to the system at once, so that a killed run keeps what it wrote.
  void append_metrics(const nlohmann::ordered_json& record);
  /// Local. Removes the records of later steps, which a run that goes on from a checkpoint writes anew. Throws tessera::Error.
  void rewind_metrics(int64_t step);

 private:
  RunDirectory(const std::filesystem::path& folder, bool anew);

  std::filesystem::path folder_;
  std::ofstream metrics_;
};

}  // namespace tessera::train
