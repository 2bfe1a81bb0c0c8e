// RunRecord: what a run writes down as it goes, its folder and its monitors.
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
#include "train/histograms.h"
#include "train/report.h"
#include "train/run_directory.h"
#include "train/task.h"
#include "train/trainer_config.h"
#include "train/trainer_state.h"

namespace tessera::train {

/// One rank's end. Rank 0's owns the folder's files and the monitors; on the other ranks everything Local
/// does nothing. Used by one thread. A run that ends by an exception closes its monitors as failed.
class RunRecord {
 public:
  RunRecord(comm::Communicator& comm, Logger log) : comm_(comm), log_(std::move(log)) {}

  /// Collective. Finds out whether the folder can be written, and may be by a run that starts anew; what it
  /// holds stays. Throws ConfigError on every rank alike.
  void open(const TrainerConfig& config, bool resume);
  /// Collective. Takes the folder over, once it is certain that this run trains; `resumed_after`: the step
  /// after which it goes on. `files`: see Task::files. Throws as open().
  void begin(const RunConfig& run, std::optional<int64_t> resumed_after,
             const std::vector<std::pair<std::string, std::string>>& files);
  /// Collective. Whether the folder has the results of a run that came to its
  /// end. To be called before begin().
  bool has_results() const;
  /// Collective. Whether the exported model is there.
  bool has_model() const;

  // Local. These two throw tessera::Error when the folder cannot be written.
  void numbers(const nlohmann::ordered_json& record);  ///< of its "step"
  void results(const Summary& summary);
  // Local. What goes wrong here is a warning.
  void state(const TrainerState& state);
  void histograms(int64_t step, const std::vector<NamedHistogram>& histograms);
  void samples(int64_t step, const std::vector<SampleFile>& samples);
  void close(RunStatus status) { monitors_.close(status); }
  /// Local. What the run has left in its folder but for the model, in the order of Summary::files.
  std::vector<std::string> files(const RunConfig& run,
                                 const std::vector<std::pair<std::string, std::string>>& task_files) const;

 private:
  void on_rank_0(const std::function<void()>& part);
  bool is_there(const char* name) const;

  comm::Communicator& comm_;
  Logger log_;
  std::optional<RunDirectory> directory_;  // rank 0
  Monitors monitors_;                      // rank 0
};

}  // namespace tessera::train
