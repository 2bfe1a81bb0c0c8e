// MlflowClient: one run on an MLflow tracking server, over its REST API
// (mlflow.org/docs/latest/api_reference/rest-api.html).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "monitor/mlflow/http_client.h"
#include "monitor/monitor.h"

namespace tessera {

/// Reports a request that a tracking server refused or did not answer.
class MlflowError : public Error {
 public:
  MlflowError(const std::string& what, bool is_temporary) : Error(what), is_temporary_(is_temporary) {}
  /// The same request may succeed later: the server cannot be reached, or is busy.
  bool is_temporary() const { return is_temporary_; }

 private:
  bool is_temporary_;
};

struct MlflowMetric {
  std::string name;
  double value = 0;
  int64_t step = 0;
  int64_t timestamp_ms = 0;  ///< since 1970
};

/// Names and values.
using MlflowParams = std::vector<std::pair<std::string, std::string>>;

/// The server's limits.
inline constexpr size_t kMlflowMetricsPerRequest = 1000;
inline constexpr size_t kMlflowParamsPerRequest = 100;
inline constexpr size_t kMlflowNameLength = 250;
inline constexpr size_t kMlflowParamLength = 6000;  ///< characters

/// The leaves of an object of any depth: {"optimizer": {"params": {"lr": 1e-3}}} is
/// {"optimizer.params.lr", "0.001"}; elements of a list of objects have their index in the name, any
/// other list is one value. In names, characters other than letters, digits and "_-. :/" become "_"; names
/// and values that are too long are cut.
MlflowParams flattened(const nlohmann::ordered_json& params);

/// Makes the requests of MLflow's REST API. Borrows the HttpClient. Used by one thread. All members wait for
/// the server and throw MlflowError.
class MlflowClient {
 public:
  /// `server`: "http://host:5000", with or without a slash at its end. The part after a '?' ("?token=…") is
  /// sent with every request, and is used nowhere else.
  MlflowClient(HttpClient& http, const std::string& server);

  /// Returns the server without the part after a '?'.
  const std::string& server() const { return server_; }
  const std::string& run_id() const { return run_id_; }

  /// Starts a run, and creates the experiment if it does not exist. The members below are about this
  /// run.
  void start_run(const std::string& experiment, const std::string& name);
  /// Resumes the run of an earlier process, which keeps its parameters. False when the server has no
  /// run with this id.
  bool resume_run(const std::string& run_id);
  /// Logs at most kMlflowMetricsPerRequest metrics.
  void log_metrics(const std::vector<MlflowMetric>& metrics);
  /// Logs any number of parameters. Parameters that a resumed run has already are not sent: a server refuses
  /// to change them.
  void log_params(const MlflowParams& params);
  /// Stores a file, or bytes, under `name` ("all_results.json", "images/a.png"). The server must store
  /// artifacts itself (artifact scheme mlflow-artifacts, the default of a server).
  void log_artifact(const std::string& name, const std::filesystem::path& file);
  void log_artifact(const std::string& name, std::string content);
  void end_run(RunStatus status);

 private:
  nlohmann::json call(const std::string& method, const std::string& path, const nlohmann::json& body);
  std::string experiment_id(const std::string& name);
  void take_run(const nlohmann::json& answer);
  std::string artifact_url(const std::string& name) const;
  std::string with_query(const std::string& url) const;
  void put(HttpRequest request);

  HttpClient& http_;
  std::string server_, query_;
  std::string run_id_;
  std::string artifact_root_;
  std::set<std::string> known_params_;
};

}  // namespace tessera
