// RunDirectory: the files a run leaves behind, OUTPUT_DIR/NAME/ with
//   config.json       every key with the value it had
//   metrics.jsonl     one JSON object a line, as training goes
//   trainer_state.json  where the run stands, at each checkpoint (train/trainer_state.h)
//   .lock             while the run lives (train/run_lock.h)
//   samples/          what the task draws at each evaluation, or at the end of a run that has none, if it
//   does (Task::write_samples) all_results.json  the final results, under Hugging Face's names; only there
//   when the run came to its end
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/line_file.h"
#include "train/run_lock.h"

namespace tessera::train {

inline constexpr const char* kConfigName = "config.json";
inline constexpr const char* kMetricsName = "metrics.jsonl";
inline constexpr const char* kCheckpointsName = "checkpoints";
inline constexpr const char* kResultsName = "all_results.json";
inline constexpr const char* kStateName = "trainer_state.json";
inline constexpr const char* kEvalResultsName = "eval_results.json";  // of `tessera eval`
inline constexpr const char* kModelName = "model.safetensors";
inline constexpr const char* kSamplesName = "samples";

/// Local. FOLDER/step_00000100ENDING, for Task::write_samples. Makes the folder; a
/// failure shows when the file is written.
std::filesystem::path sample_path(const std::filesystem::path& folder, int64_t step, std::string_view ending);

/// Writes from one rank (rank 0). Owns the folder's lock and the open metrics file. Not thread-safe.
class RunDirectory {
 public:
  /// Local. Creates the folder, takes its lock, and finds out whether files can be written there, but leaves
  /// what an earlier run has written: begin() or go_on() follows once it is certain that this run will train.
  /// Throws ConfigError naming the folder and the reason when it cannot be written, and as RunLock.
  explicit RunDirectory(const std::filesystem::path& folder);
  /// Local. Removes an earlier run's results, and starts metrics.jsonl anew. Throws tessera::Error.
  void begin();
  /// Local. For a run that goes on after `step`: removes the results and the records of later steps, which
  /// it writes anew. Throws tessera::Error.
  void go_on(int64_t step);

  const std::filesystem::path& folder() const { return folder_; }
  const RunLock& lock() const { return lock_.value(); }
  /// Local. Replaces a file as a whole: who reads it sees the old content or
  /// the new one. Throws tessera::Error.
  void write(const std::string& name, const std::string& content) const;
  /// Local. Appends one record; a killed run keeps what it wrote. Throws tessera::Error.
  void append_metrics(const nlohmann::ordered_json& record);
  /// Local. What append_metrics() was given, by this process and those before it that this one goes on from.
  std::vector<nlohmann::ordered_json> metrics() const;

 private:
  void remove_outdated() const;

  std::filesystem::path folder_;
  std::optional<RunLock> lock_;      // from the constructor's end on
  std::optional<LineFile> metrics_;  // from begin() or go_on() on
};

}  // namespace tessera::train
