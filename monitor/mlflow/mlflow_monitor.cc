#include "monitor/mlflow/mlflow_monitor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/files/disk.h"
#include "core/http_url.h"
#include "core/str.h"
#include "monitor/file_name.h"
#include "monitor/wall_time.h"

namespace tessera {
namespace {

/// A quarter of a server's limit for one request: a failed run has two seconds to send its status, which
/// waits for the current request.
constexpr size_t kMetricsTogether = kMlflowMetricsPerRequest / 4;

constexpr int64_t kLongestId = 256;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

/// The first that is not empty.
std::string first_of(const std::string& first, const std::string& second, const std::string& third) {
  return !first.empty() ? first : !second.empty() ? second : third;
}

}  // namespace

void forget_mlflow_run(const std::filesystem::path& folder) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::remove(folder / kMlflowRunIdName, error);
  if (error) throw Error(folder / kMlflowRunIdName, " cannot be removed: ", error.message());
}

MlflowOptions with_environment(MlflowOptions options) {
  const MlflowOptions defaults;
  options.server = first_of(options.server, environment("MLFLOW_TRACKING_URI"), defaults.server);
  if (!is_http_url(options.server))
    throw ConfigError("MLFLOW_TRACKING_URI: found ",
                      options.server.find('@') == options.server.npos
                          ? str("\"", options.server.substr(0, options.server.find('?')), "\"")
                          : "a user's name in it",
                      "; expected the address of a server, http://… or https://…");
  options.experiment =
      first_of(options.experiment, environment("MLFLOW_EXPERIMENT_NAME"), defaults.experiment);
  options.user = environment("MLFLOW_TRACKING_USERNAME");
  options.password = environment("MLFLOW_TRACKING_PASSWORD");
  options.token = environment("MLFLOW_TRACKING_TOKEN");
  return options;
}

MlflowMonitor::MlflowMonitor(MlflowOptions options) : options_(std::move(options)) {
  thread_ = std::thread([this] { run(); });
}

MlflowMonitor::~MlflowMonitor() {
  if (!thread_.joinable()) return;
  try {
    close(RunStatus::kFailed);
  } catch (const std::exception&) {  // of the log
  }
}

// ---------------------------------------------------------------------------------- on the run's thread

void MlflowMonitor::scalars(int64_t step, const Scalars& scalars) {
  const int64_t now_ms = std::llround(wall_time_s() * 1e3);
  Work work;
  for (const auto& [name, value] : scalars) work.metrics.push_back({name, value, step, now_ms});
  if (!work.metrics.empty()) push(std::move(work));
}

void MlflowMonitor::image(const std::string& name, int64_t step, const PngView& png) {
  const std::string place = step_file("images", name, step, ".png");
  if (png.file.empty())
    push({.other = [place, bytes = std::string(png.bytes)](MlflowClient& client) {
      client.log_artifact(place, bytes);
    }});
  else
    push({.other = [place, file = png.file](MlflowClient& client) { client.log_artifact(place, file); }});
}

void MlflowMonitor::text(const std::string& name, int64_t step, const std::string& text) {
  push({.other = [place = step_file("texts", name, step, ".txt"), text](MlflowClient& client) {
    client.log_artifact(place, text);
  }});
}

void MlflowMonitor::params(const nlohmann::ordered_json& params) {
  push({.metrics = {},
        .other = [flat = flattened(params)](MlflowClient& client) { client.log_params(flat); },
        .may_be_lost = false});
}

void MlflowMonitor::artifact(const std::filesystem::path& file) {
  push({.metrics = {},
        .other = [file](MlflowClient& client) { client.log_artifact(file.filename().string(), file); },
        .may_be_lost = false});
}

// A full queue drops its oldest metrics, images and texts; parameters and results are few, and are kept.
void MlflowMonitor::push(Work work) {
  if (gave_up_) return;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= options_.max_queued) {
      const auto oldest =
          std::find_if(queue_.begin(), queue_.end(), [](const Work& queued) { return queued.may_be_lost; });
      if (oldest == queue_.end()) return;
      queue_.erase(oldest);
    }
    queue_.push_back(std::move(work));
  }
  changed_.notify_one();
}

void MlflowMonitor::close(RunStatus status) {
  {
    const std::lock_guard lock(mutex_);
    Work end{.metrics = {},
             .other = [status](MlflowClient& client) { client.end_run(status); },
             .may_be_lost = false};
    // When a rank fails, the launcher gives the others two seconds. So a failed run's status is sent first;
    // the server accepts the rest of the numbers afterwards.
    const bool has_failed = status == RunStatus::kFailed;
    has_failed ? queue_.push_front(std::move(end)) : queue_.push_back(std::move(end));
    is_closing_ = true;
    const auto limit = has_failed ? options_.close_timeout_failed : std::chrono::milliseconds::max();
    deadline_ = (Clock::now() +
                 std::min(limit, is_failing_ ? options_.close_timeout_failing : options_.close_timeout))
                    .time_since_epoch()
                    .count();
  }
  changed_.notify_one();
  thread_.join();
}

// ------------------------------------------------------------------------------------- on its own thread

void MlflowMonitor::run() {
  try {
    HttpClient http({.timeout = options_.request_timeout,
                     .give_up = [this] { return past_deadline(); },
                     .user = options_.user,
                     .password = options_.password,
                     .token = options_.token});
    MlflowClient client(http, options_.server);
    gave_up_ = !do_until_done(client, [&] { begin(client); }, /*is_vital=*/true);
    for (Work work; !gave_up_ && take(work);) {
      const auto send = [&] { work.metrics.empty() ? work.other(client) : client.log_metrics(work.metrics); };
      gave_up_ = !do_until_done(client, send, /*is_vital=*/false);
    }
  } catch (const std::exception& error) {  // out of memory
    gave_up_ = true;
    warn(error.what());
  }
}

/// Takes the next record, with the metrics that follow it; false: the queue is empty, and closed.
bool MlflowMonitor::take(Work& work) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !queue_.empty() || is_closing_; });
  if (queue_.empty()) return false;
  work = std::move(queue_.front());
  queue_.pop_front();
  while (!work.metrics.empty() && !queue_.empty() && !queue_.front().metrics.empty() &&
         work.metrics.size() + queue_.front().metrics.size() <= kMetricsTogether) {
    std::move(queue_.front().metrics.begin(), queue_.front().metrics.end(), std::back_inserter(work.metrics));
    queue_.pop_front();
  }
  return true;
}

/// Tries until `work` succeeds or is refused. False: give up, because the run has ended, or because `work` is
/// vital and was refused.
bool MlflowMonitor::do_until_done(MlflowClient& client, const std::function<void()>& work, bool is_vital) {
  for (auto time = options_.first_retry;; time = std::min(2 * time, options_.last_retry)) {
    try {
      if (past_deadline()) throw MlflowError("", /*is_temporary=*/true);
      work();
      is_failing_ = false;
      return true;
    } catch (const MlflowError& error) {
      warn(past_deadline() ? str(client.server(), " has not taken everything in time") : error.what());
      if (!error.is_temporary()) return !is_vital;
    } catch (const std::exception& error) {  // an answer of another form
      warn(str(client.server(), ": ", error.what()));
      return !is_vital;
    }
    is_failing_ = true;
    if (!pause(time)) return false;
  }
}

/// False: close() was called before, so that this was the last attempt.
bool MlflowMonitor::pause(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  if (is_closing_) return false;
  changed_.wait_for(lock, time, [this] { return is_closing_; });
  return true;
}

void MlflowMonitor::begin(MlflowClient& client) const {
  std::error_code error;
  if (options_.resume && std::filesystem::exists(options_.id_file, error) &&
      client.resume_run(InputFile(options_.id_file).read_all(kLongestId)))
    return;
  std::filesystem::remove(options_.id_file, error);  // of an earlier run
  client.start_run(options_.experiment, options_.run_name);
  if (!options_.id_file.empty()) replace_file(options_.id_file, client.run_id());
}

void MlflowMonitor::warn(const std::string& what) {
  if (!has_warned_.exchange(true))
    options_.log.warning(str("mlflow: ", what, "; the run does not wait for it"));
}

}  // namespace tessera
