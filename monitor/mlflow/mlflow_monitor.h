// MlflowMonitor: a run on an MLflow tracking server, sent by its own thread.
//
// Training never waits for the tracking server.
// The run's records go into a queue of bounded length, and a thread sends them to the server. When the server
// cannot be reached, or is busy, the thread tries again after 1, 2, 4 … 60 seconds, as long as the run lasts;
// a full queue drops its oldest values. Records that the server refuses are dropped. The first error of a run
// is logged, in one line. close() waits for the rest of the queue, with a time limit, which is shorter when
// the server did not answer last time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/log.h"
#include "monitor/mlflow/mlflow_client.h"
#include "monitor/monitor.h"

namespace tessera {

/// This file in the run's folder has the run's id on the server.
inline constexpr const char* kMlflowRunIdName = "mlflow_run_id";

struct MlflowOptions {
  std::string server = "http://127.0.0.1:5000";
  std::string experiment = "Default";
  std::string run_name;
  /// Names where the run's id on the server is kept for a process that resumes it; empty: nowhere.
  std::filesystem::path id_file;
  bool resume = false;  ///< resumes the run in id_file
  Logger log;
  std::string user, password, token;  ///< of the server's authentication
  std::chrono::milliseconds request_timeout{30'000};
  std::chrono::milliseconds first_retry{1'000}, last_retry{60'000};
  std::chrono::milliseconds close_timeout{10'000};        ///< close() takes at most about a second more
  std::chrono::milliseconds close_timeout_failed{1'500};  ///< of a run that failed
  std::chrono::milliseconds close_timeout_failing{
      5'000};                 ///< of a server that has not answered yet, or not the last time
  size_t max_queued = 1'000;  ///< calls of the monitor
};

/// An empty server or experiment is filled in from MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME, or
/// else has the default of MlflowOptions; the authentication is that of MLFLOW_TRACKING_USERNAME, _PASSWORD
/// and _TOKEN. Throws ConfigError when the environment's address is not an HTTP server's.
MlflowOptions with_environment(MlflowOptions options);

/// Removes the id of an earlier run from `folder`. To be called for every new run, with MLflow or
/// without, so that none resumes the earlier one. Throws tessera::Error.
void forget_mlflow_run(const std::filesystem::path& folder);

/// Sends a run's numbers to an MLflow server. Owns the queue and the thread, which makes all requests.
/// Members but close() return at once and do not throw. A run in MLflow cannot hold histograms; images and
/// texts become artifacts, images/NAME_STEP.png and texts/NAME_STEP.txt. Used by one thread.
class MlflowMonitor final : public Monitor {
 public:
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
  using Clock = std::chrono::steady_clock;
  /// Metrics, which may be sent together with those of the next ones, or another request.
  struct Work {
    std::vector<MlflowMetric> metrics = {};
    std::function<void(MlflowClient&)> other = {};
    bool may_be_lost = true;  // when the queue is full
  };

  void push(Work work);
  void run();
  bool take(Work& work);
  bool do_until_done(MlflowClient& client, const std::function<void()>& work, bool is_vital);
  bool pause(std::chrono::milliseconds time);
  void begin(MlflowClient& client) const;
  bool past_deadline() const { return Clock::now().time_since_epoch().count() > deadline_.load(); }
  void warn(const std::string& what);

  const MlflowOptions options_;
  std::mutex mutex_;  // of the queue and is_closing_
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool is_closing_ = false;
  std::atomic<bool> gave_up_{false};
  std::atomic<bool> is_failing_{true};  // no request has been answered yet, or the last was not
  std::atomic<bool> has_warned_{false};
  std::atomic<Clock::rep> deadline_{Clock::time_point::max().time_since_epoch().count()};  // of close()
  std::thread thread_;
};

}  // namespace tessera
