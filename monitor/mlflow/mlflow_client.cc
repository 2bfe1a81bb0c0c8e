#include "monitor/mlflow/mlflow_client.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/utf8.h"
#include "monitor/wall_time.h"

namespace tessera {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kApi = "/api/2.0/mlflow/";
constexpr const char* kArtifactApi = "/api/2.0/mlflow-artifacts/artifacts/";
constexpr const char* kArtifactScheme = "mlflow-artifacts:";

int64_t now_ms() { return std::llround(wall_time_s() * 1e3); }

std::string accepted_name(std::string name) {
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) &&
        std::string_view("_-. :/").find(c) == std::string_view::npos)
      c = '_';
  return name.substr(0, kMlflowNameLength);
}

void flatten(const ordered_json& value, const std::string& path, MlflowParams& out) {
  const bool has_parts =
      value.is_object() ||
      (value.is_array() &&
       std::any_of(value.begin(), value.end(), [](const ordered_json& item) { return item.is_object(); }));
  if (!has_parts) {
    const std::string text = value.is_string()
                                 ? value.get<std::string>()
                                 : value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
    out.emplace_back(accepted_name(path), first_characters(text, kMlflowParamLength));
    return;
  }
  for (const auto& [name, item] : value.items()) flatten(item, path.empty() ? name : path + "." + name, out);
}

/// JSON has no number for them; protobuf's JSON has words.
json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

/// The message of the server about a request that failed.
std::string reason_of(const HttpResponse& response) {
  const json answer = parse_json_or_discard(response.body);
  std::string text = str("status ", response.status);
  if (answer.is_object() && answer.contains("message") && answer["message"].is_string())
    text += ", " + quoted_name(answer["message"].get<std::string>());
  return text;
}

bool has_code(const HttpResponse& response, const char* code) {
  const json answer = parse_json_or_discard(response.body);
  return answer.is_object() && answer.value("error_code", json()) == code;
}

/// A server's error with the code it gave.
class Refused : public MlflowError {
 public:
  Refused(const std::string& what, bool is_temporary, HttpResponse answer)
      : MlflowError(what, is_temporary), answer_(std::move(answer)) {}
  bool is(const char* code) const { return has_code(answer_, code); }

 private:
  HttpResponse answer_;
};

[[noreturn]] void fail_unreachable(const std::string& server, const HttpError& error) {
  throw MlflowError(str(server, " does not answer (", error.what(), ")"), /*is_temporary=*/true);
}

void check(const std::string& server, const std::string& what, const HttpResponse& response) {
  if (response.status >= 200 && response.status < 300) return;
  const bool is_temporary = response.status >= 500 || response.status == 408 || response.status == 429;
  throw Refused(str(server, " refuses ", what, ": ", reason_of(response)), is_temporary, response);
}

}  // namespace

MlflowParams flattened(const ordered_json& params) {
  MlflowParams out;
  flatten(params, "", out);
  return out;
}

MlflowClient::MlflowClient(HttpClient& http, const std::string& server)
    : http_(http), server_(server.substr(0, server.find('?'))) {
  if (server_.size() < server.size()) query_ = server.substr(server_.size() + 1);
  while (server_.ends_with('/')) server_.pop_back();
}

std::string MlflowClient::with_query(const std::string& url) const {
  return query_.empty() ? url : str(url, url.find('?') == url.npos ? '?' : '&', query_);
}

json MlflowClient::call(const std::string& method, const std::string& path, const json& body) {
  HttpRequest request{.method = method, .url = with_query(server_ + kApi + path)};
  if (method != "GET") request.body = body.dump(-1, ' ', false, json::error_handler_t::replace);
  HttpResponse response;
  try {
    response = http_.send(request);
  } catch (const HttpError& error) {
    fail_unreachable(server_, error);
  }
  check(server_, path.substr(0, path.find('?')), response);
  json answer = parse_json_or_discard(response.body);
  if (!answer.is_object())
    throw MlflowError(str(server_, " answers ", path.substr(0, path.find('?')),
                          " with something that is no JSON object; expected an MLflow server"),
                      /*is_temporary=*/false);
  return answer;
}

std::string MlflowClient::experiment_id(const std::string& name) {
  const auto find = [&] {
    const json answer = call("GET", "experiments/get-by-name?experiment_name=" + url_encoded(name), {});
    const json experiment = answer.value("experiment", json::object());
    if (experiment.value("lifecycle_stage", "") == "deleted")
      throw MlflowError(str("the experiment ", quoted_name(name), " is deleted on ", server_,
                            "; expected it to be restored, or another name"),
                        /*is_temporary=*/false);
    return experiment.value("experiment_id", "");
  };
  try {
    return find();
  } catch (const Refused& error) {
    if (!error.is("RESOURCE_DOES_NOT_EXIST")) throw;
  }
  try {
    return call("POST", "experiments/create", {{"name", name}}).value("experiment_id", "");
  } catch (const Refused& error) {
    if (!error.is("RESOURCE_ALREADY_EXISTS")) throw;  // made by another run in the meantime
  }
  return find();
}

void MlflowClient::take_run(const json& answer) {
  const json run = answer.value("run", json::object());
  const json info = run.value("info", json::object());
  run_id_ = info.value("run_id", "");
  artifact_root_ = info.value("artifact_uri", "");
  if (run_id_.empty())
    throw MlflowError(str(server_, " answers without a run's id; expected an MLflow server"),
                      /*is_temporary=*/false);
  known_params_.clear();
  const json params = run.value("data", json::object()).value("params", json::array());
  for (const json& param : params) known_params_.insert(param.value("key", ""));
}

void MlflowClient::start_run(const std::string& experiment, const std::string& name) {
  const char* user = std::getenv("USER");
  const json tags = {{{"key", "mlflow.source.name"}, {"value", "tessera"}},
                     {{"key", "mlflow.source.type"}, {"value", "LOCAL"}},
                     {{"key", "mlflow.user"}, {"value", user != nullptr ? user : ""}}};
  take_run(call("POST", "runs/create",
                {{"experiment_id", experiment_id(experiment)},
                 {"run_name", name},
                 {"start_time", now_ms()},
                 {"tags", tags}}));
}

bool MlflowClient::resume_run(const std::string& run_id) {
  try {
    take_run(call("GET", "runs/get?run_id=" + url_encoded(run_id), {}));
    call("POST", "runs/update", {{"run_id", run_id_}, {"status", "RUNNING"}});
  } catch (const Refused& error) {
    if (error.is("RESOURCE_DOES_NOT_EXIST") || error.is("INVALID_PARAMETER_VALUE")) return false;
    throw;
  }
  return true;
}

void MlflowClient::log_metrics(const std::vector<MlflowMetric>& metrics) {
  json list = json::array();
  for (const MlflowMetric& metric : metrics)
    list.push_back({{"key", accepted_name(metric.name)},
                    {"value", number(metric.value)},
                    {"timestamp", metric.timestamp_ms},
                    {"step", metric.step}});
  call("POST", "runs/log-batch", {{"run_id", run_id_}, {"metrics", list}});
}

void MlflowClient::log_params(const MlflowParams& params) {
  MlflowParams missing;
  for (const auto& param : params)
    if (!known_params_.contains(param.first)) missing.push_back(param);
  for (size_t start = 0; start < missing.size(); start += kMlflowParamsPerRequest) {
    const size_t end = std::min(start + kMlflowParamsPerRequest, missing.size());
    json list = json::array();
    for (size_t i = start; i < end; ++i)
      list.push_back({{"key", missing[i].first}, {"value", missing[i].second}});
    call("POST", "runs/log-batch", {{"run_id", run_id_}, {"params", list}});
    for (size_t i = start; i < end; ++i) known_params_.insert(missing[i].first);
  }
}

std::string MlflowClient::artifact_url(const std::string& name) const {
  if (!artifact_root_.starts_with(kArtifactScheme))
    throw MlflowError(
        str(server_, " does not store artifacts itself (the run's artifact URI is ",
            quoted_name(artifact_root_), "); expected a server that runs with --serve-artifacts"),
        /*is_temporary=*/false);
  std::string root = artifact_root_.substr(std::string_view(kArtifactScheme).size());
  if (root.starts_with("//"))
    root = root.substr(std::min(root.find('/', 2), root.size()));  // another name for the server
  root.erase(0, root.find_first_not_of('/'));
  std::string url = server_ + kArtifactApi + root;
  for (size_t start = 0; start <= name.size();) {
    const size_t slash = std::min(name.find('/', start), name.size());
    url.append("/").append(url_encoded(name.substr(start, slash - start)));
    start = slash + 1;
  }
  return with_query(url);
}

void MlflowClient::put(HttpRequest request) {
  request.method = "PUT";
  request.content_type = "application/octet-stream";
  HttpResponse response;
  try {
    response = http_.send(request);
  } catch (const HttpError& error) {
    fail_unreachable(server_, error);
  }
  check(server_, "an artifact", response);
}

void MlflowClient::log_artifact(const std::string& name, const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error))
    throw MlflowError(str("the artifact ", quoted_name(file.string()), " is no file that can be read"),
                      /*is_temporary=*/false);
  put({.url = artifact_url(name), .file = file});
}

void MlflowClient::log_artifact(const std::string& name, std::string content) {
  put({.url = artifact_url(name), .body = std::move(content)});
}

void MlflowClient::end_run(RunStatus status) {
  call("POST", "runs/update", {{"run_id", run_id_}, {"status", name_of(status)}, {"end_time", now_ms()}});
}

}  // namespace tessera
