#include "monitor/mlflow/http_client.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "monitor/mlflow/curl_library.h"

namespace tessera {
namespace {

constexpr size_t kLongestAnswer = 16 << 20;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

struct FreeHeaders {
  void operator()(curl_slist* headers) const { curl_library().slist_free_all(headers); }
};
using Headers = std::unique_ptr<curl_slist, FreeHeaders>;

void add_header(Headers& headers, const std::string& line) {
  curl_slist* longer = curl_library().slist_append(headers.get(), line.c_str());
  if (longer == nullptr) throw HttpError("out of memory");
  [[maybe_unused]] const curl_slist* const before = headers.release();  // a part of `longer` now
  headers.reset(longer);
}

size_t take_answer(char* data, size_t size, size_t count, void* body) {
  auto& text = *static_cast<std::string*>(body);
  if (text.size() + size * count > kLongestAnswer) return 0;  // ends the request
  text.append(data, size * count);
  return size * count;
}

size_t read_file(char* data, size_t size, size_t count, void* file) {
  return std::fread(data, size, count, static_cast<std::FILE*>(file));
}

int ask_whether_to_give_up(void* give_up, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return (*static_cast<const std::function<bool()>*>(give_up))() ? 1 : 0;
}

/// Throws HttpError.
File open_file(const std::filesystem::path& path) {
  errno = 0;
  File file(std::fopen(path.c_str(), "rb"));
  if (!file) throw HttpError(path, " cannot be read: ", std::strerror(errno));
  return file;
}

}  // namespace

struct HttpClient::Curl {
  const CurlLibrary& library = curl_library();
  CURL* handle = library.easy_init();
  ~Curl() { library.easy_cleanup(handle); }

  template <class Value>
  void set(CURLoption option, Value value) {
    if (const CURLcode code = library.easy_setopt(handle, option, value); code != CURLE_OK)
      throw HttpError("libcurl option ", static_cast<int>(option), ": ", library.easy_strerror(code));
  }
};

HttpClient::HttpClient(HttpOptions options) : options_(std::move(options)), curl_(std::make_unique<Curl>()) {
  if (curl_->handle == nullptr) throw HttpError("libcurl cannot be initialized");
}

HttpClient::~HttpClient() = default;

HttpResponse HttpClient::send(const HttpRequest& request) {
  HttpResponse response;
  char reason[CURL_ERROR_SIZE] = "";
  Headers headers;
  File file;
  curl_->library.easy_reset(curl_->handle);  // keeps the connection
  curl_->set(CURLOPT_URL, request.url.c_str());
  curl_->set(CURLOPT_PROTOCOLS_STR, "http,https");
  curl_->set(CURLOPT_NOSIGNAL, 1L);    // signals are the program's
  curl_->set(CURLOPT_QUICK_EXIT, 1L);  // don't wait for a name server's answer after giving up
  curl_->set(CURLOPT_ERRORBUFFER, reason);
  curl_->set(CURLOPT_WRITEFUNCTION, &take_answer);
  curl_->set(CURLOPT_WRITEDATA, &response.body);
  if (options_.give_up) {
    curl_->set(CURLOPT_NOPROGRESS, 0L);
    curl_->set(CURLOPT_XFERINFOFUNCTION, &ask_whether_to_give_up);
    curl_->set(CURLOPT_XFERINFODATA, &options_.give_up);
  }
  if (!options_.user.empty()) {
    curl_->set(CURLOPT_USERNAME, options_.user.c_str());
    curl_->set(CURLOPT_PASSWORD, options_.password.c_str());
  }
  if (!options_.token.empty()) add_header(headers, "Authorization: Bearer " + options_.token);
  add_header(headers, "Expect:");  // the body goes with the request
  const auto timeout = static_cast<long>(options_.timeout.count());
  curl_->set(CURLOPT_CONNECTTIMEOUT_MS, timeout);
  if (!request.file.empty()) {
    file = open_file(request.file);
    curl_->set(CURLOPT_UPLOAD, 1L);
    curl_->set(CURLOPT_READFUNCTION, &read_file);
    curl_->set(CURLOPT_READDATA, file.get());
    curl_->set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(std::filesystem::file_size(request.file)));
    curl_->set(CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_->set(CURLOPT_LOW_SPEED_TIME, std::max(1L, timeout / 1000));
  } else {
    curl_->set(CURLOPT_TIMEOUT_MS, timeout);
    if (request.method != "GET") {
      curl_->set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
      curl_->set(CURLOPT_POSTFIELDS, request.body.data());
    }
  }
  if (request.method != "GET") {
    add_header(headers, "Content-Type: " + request.content_type);
    curl_->set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  curl_->set(CURLOPT_HTTPHEADER, headers.get());

  const CURLcode code = curl_->library.easy_perform(curl_->handle);
  if (code != CURLE_OK) throw HttpError(reason[0] != '\0' ? reason : curl_->library.easy_strerror(code));
  curl_->library.easy_getinfo(curl_->handle, CURLINFO_RESPONSE_CODE, &response.status);
  return response;
}

std::string url_encoded(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::strchr("-_.~", c) != nullptr;
    char escape[4];
    std::snprintf(escape, sizeof escape, "%%%02X", static_cast<unsigned char>(c));
    out += plain && c != '\0' ? std::string(1, c) : escape;
  }
  return out;
}

}  // namespace tessera
