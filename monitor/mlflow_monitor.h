// MlflowMonitor: a run on an MLflow tracking server, or in one of MLflow's stores.
//
// Training never waits for MLflow.
// The run writes records into a file of a temporary folder. A process of Python (mlflow_feed.py, whose text
// is in this library) follows it, and gives them to MLflow's own library (PyPI: mlflow-skinny, or mlflow).
// Where a server cannot be reached, or is busy, that process tries again after 1, 2, 4 … 60 seconds, as long
// as the run lasts. Records that are refused are dropped. The first error of a run is logged, in one line.
// close() waits for the rest, with a time limit; that process then goes on for up to 30 s.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>

#include "core/files/file_descriptor.h"
#include "core/files/line_file.h"
#include "core/files/temporary_folder.h"
#include "core/log.h"
#include "monitor/monitor.h"

namespace tessera {

/// This file in the run's folder has the run's id on the server.
inline constexpr const char* kMlflowRunIdName = "mlflow_run_id";

struct MlflowOptions {
  std::string server =
      {};  ///< as MLflow's library takes it; empty: MLFLOW_TRACKING_URI, or http://127.0.0.1:5000
  std::string experiment = {};  ///< empty: MLFLOW_EXPERIMENT_NAME, or Default
  std::string run_name = {};
  /// Names where the run's id on the server is kept for a process that resumes it; empty: nowhere.
  std::filesystem::path id_file = {};
  bool resume = false;  ///< resumes the run in id_file
  Logger log = {};
};

/// Removes the id of an earlier run from `folder`. To be called for every new run, with MLflow or
/// without, so that none resumes the earlier one. Throws tessera::Error.
void forget_mlflow_run(const std::filesystem::path& folder);

/// Gives a run's numbers to MLflow. Owns the folder and the process. Members but close() wait for no server.
/// A run in MLflow cannot hold histograms; images and texts become artifacts, images/NAME_STEP.png and
/// texts/NAME_STEP.txt. Used by one thread. The process ends by itself when this one is killed, and the run
/// has failed then.
class MlflowMonitor final : public Monitor {
 public:
  /// Throws ConfigError when there is no Python (TESSERA_PYTHON, or else python3) with MLflow's library.
  explicit MlflowMonitor(MlflowOptions options);
  ~MlflowMonitor() override;  ///< closes as kFailed, unless it was closed

  std::string_view name() const override { return "mlflow"; }
  void scalars(int64_t step, const Scalars& scalars) override;
  void image(const std::string& name, int64_t step,
             const PngView& png) override;  ///< a file's is read later, as an artifact is
  void text(const std::string& name, int64_t step, const std::string& text) override;
  void params(const nlohmann::ordered_json& params) override;
  void artifact(const std::filesystem::path& file) override;  ///< is read later: the file has to stay
  void close(RunStatus status) override;

 private:
  void start();
  void write(const nlohmann::ordered_json& record);
  bool hear(std::chrono::milliseconds limit);
  void end();
  void warn(const std::string& what);

  const MlflowOptions options_;
  TemporaryFolder folder_;
  LineFile events_;
  pid_t process_ = -1;
  int64_t num_images_ = 0;
  FileDescriptor input_, output_;  ///< the process's
  std::string heard_;              ///< of a line that is not complete yet
  bool has_warned_ = false;
};

}  // namespace tessera
