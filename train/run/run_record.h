// RunRecord: writes a run's metrics and results to its output folder and its monitors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "comm/communicator.h"
#include "core/log.h"
#include "monitor/monitors.h"
#include "train/report/histograms.h"
#include "train/report/report.h"
#include "train/run/run_directory.h"
#include "train/run/trainer_state.h"
#include "train/task/task.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

/// Writes down what a run does. On rank 0 owns the output folder's files and the monitors; on other ranks
/// every member that is not collective does nothing. The destructor closes the monitors as failed unless
/// close() was called. Used by one thread.
class RunRecord {
 public:
  RunRecord(comm::Communicator& comm, Logger log) : comm_(comm), log_(std::move(log)) {}

  /// Collective. Locks the folder and checks that it can be written and, for a new run, that it has no
  /// unfinished one; `must_have_a_run`: that it has checkpoints. Changes no files. Returns the run's id: for
  /// a run that is resumed the folder's, which is empty if it has none; else a new one. Throws ConfigError on
  /// every rank alike.
  std::string open(const TrainerConfig& config, bool resume, bool must_have_a_run);
  /// Collective. Prepares the folder and opens the monitors, once it is certain that this run trains.
  /// `run_id`: the run's; `resumed_after`: the step after which the run is resumed; unset: a new run.
  /// `files`: Task::files(). Throws as open().
  void begin(const RunConfig& run, const std::string& run_id, std::optional<int64_t> resumed_after,
             const std::vector<std::pair<std::string, std::string>>& files);
  /// Collective. Whether the folder has the results of a finished run. To be called before begin().
  bool has_results() const;
  /// Collective. Whether the folder has the exported model.
  bool has_model() const;

  // These two throw tessera::Error if the folder cannot be written.
  void log_metrics(const nlohmann::ordered_json& record);  ///< must have a "step"
  void write_results(const Summary& summary);
  // A failure of these is logged as a warning.
  void write_state(const TrainerState& state);
  void log_histograms(int64_t step, const std::vector<NamedHistogram>& histograms);
  void log_samples(int64_t step, const std::vector<SampleFile>& samples);
  void close(RunStatus status) { monitors_.close(status); }
  /// The run's files except the model, for Summary::files.
  std::vector<std::string> files(const RunConfig& run,
                                 const std::vector<std::pair<std::string, std::string>>& task_files) const;

 private:
  void do_on_rank_0(const std::function<void()>& part);
  bool exists(const char* name) const;

  comm::Communicator& comm_;
  Logger log_;
  std::optional<RunDirectory> directory_;  // rank 0
  Monitors monitors_;                      // rank 0
};

}  // namespace tessera::train
