// HttpClient: requests to one server, over libcurl.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "core/error.h"

namespace tessera {

/// Reports that a server gave no answer: it cannot be reached, does not answer in time, or the request was
/// cancelled.
class HttpError : public Error {
 public:
  using Error::Error;
};

struct HttpRequest {
  std::string method = "GET";
  std::string url = {};
  std::string body = {};
  std::string content_type = "application/json";
  std::filesystem::path file = {};  ///< sent in place of the body
};

struct HttpResponse {
  long status = 0;  ///< 200 …
  std::string body;
};

struct HttpOptions {
  std::chrono::milliseconds timeout{
      30'000};  ///< of a request without a file: to its end; with one: without any progress
  /// Is called about once a second during a request; true cancels it. May be unset.
  std::function<bool()> give_up;
  std::string user, password;  ///< HTTP basic authentication; empty: none
  std::string token;           ///< bearer token; empty: none
};

/// Sends HTTP requests to one server. Keeps its connection open between requests. Used by one thread. Follows
/// the environment's http_proxy, https_proxy and no_proxy, as curl does.
class HttpClient {
 public:
  /// Throws HttpError where there is no libcurl (monitor/mlflow/curl_library.h).
  explicit HttpClient(HttpOptions options);
  HttpClient(HttpClient&&) = delete;
  ~HttpClient();

  /// Returns answers of any status. Throws HttpError.
  HttpResponse send(const HttpRequest& request);

 private:
  struct Curl;
  HttpOptions options_;
  std::unique_ptr<Curl> curl_;
};

/// `text` with all bytes but letters, digits and "-_.~" as %XX.
std::string url_encoded(const std::string& text);

}  // namespace tessera
