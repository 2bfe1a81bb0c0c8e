// RunDirectory: the files of a run in its output folder:
//
//   config.json         the resolved configuration
//   metrics.jsonl       one JSON object per line, appended during training
//   run_id              the run's random name, which its checkpoints have too
//   trainer_state.json  the run's progress, written at each checkpoint (train/run/trainer_state.h)
//   .lock               while the run's process lives (train/run/run_lock.h)
//   samples/            files for people to look at, if the task writes any (Task::write_samples)
//   all_results.json    the final results, under Hugging Face's names; only for a finished run
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/files/line_file.h"
#include "train/run/run_lock.h"

namespace tessera::train {

inline constexpr const char* kConfigName = "config.json";
inline constexpr const char* kMetricsName = "metrics.jsonl";
inline constexpr const char* kCheckpointsName = "checkpoints";
inline constexpr const char* kRunIdName = "run_id";
inline constexpr const char* kResultsName = "all_results.json";
inline constexpr const char* kStateName = "trainer_state.json";
inline constexpr const char* kEvalResultsName = "eval_results.json";  // of `tessera eval`
inline constexpr const char* kModelName = "model.safetensors";
inline constexpr const char* kSamplesName = "samples";

/// Where the run in this folder has its checkpoints.
inline std::filesystem::path checkpoints_of(const std::filesystem::path& folder) {
  return folder / kCheckpointsName;
}

/// FOLDER/step_00000100ENDING, for Task::write_samples. Creates the folder; if that fails, writing the
/// file will fail.
std::filesystem::path sample_path(const std::filesystem::path& folder, int64_t step, std::string_view ending);

/// The content of FOLDER/run_id; empty: there is none, as in folders of older versions. Throws
/// tessera::Error if it holds something else.
std::string read_run_id(const std::filesystem::path& folder);

/// Writes the files of a run's folder. For rank 0 only. Owns the folder's lock and the open metrics file. Not
/// thread-safe.
class RunDirectory {
 public:
  /// Creates the folder, takes its lock, and checks that files can be written there. Leaves an earlier
  /// run's files as they are: begin() or resume() follows once it is certain that this run will train. Throws
  /// ConfigError with the folder and the reason if it cannot be written or has files of these names that are
  /// no run's, and as RunLock.
  explicit RunDirectory(const std::filesystem::path& folder);
  /// Is called for a new run. Removes an earlier run's results and empties metrics.jsonl. Throws
  /// tessera::Error.
  void begin();
  /// Is called for a run resumed after `step`. Removes the results, and the records of later steps, which
  /// will be written again. Returns what was damaged in metrics.jsonl, one line for the user; empty: nothing.
  /// Throws tessera::Error.
  std::string resume(int64_t step);

  const std::filesystem::path& folder() const { return folder_; }
  const RunLock& lock() const { return lock_.value(); }
  /// Replaces a file atomically. Throws tessera::Error.
  void write(const std::string& name, const std::string& content) const;
  /// Appends one record and flushes it. Throws tessera::Error.
  void append_metrics(const nlohmann::ordered_json& record);
  /// The records of this run so far, those of earlier processes it was resumed from included.
  std::vector<nlohmann::ordered_json> metrics() const;

 private:
  void remove_results() const;

  std::filesystem::path folder_;
  std::optional<RunLock> lock_;      // set by the constructor
  std::optional<LineFile> metrics_;  // set by begin() or resume()
};

}  // namespace tessera::train
