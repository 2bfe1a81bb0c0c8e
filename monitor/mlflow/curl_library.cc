#include "monitor/mlflow/curl_library.h"

#include <dlfcn.h>

#include <string>

#include "monitor/mlflow/http_client.h"

namespace tessera {
namespace {

/// Both have the same functions: one with OpenSSL, one with GnuTLS.
constexpr const char* kNames[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};

void* open_library() {
  std::string reason;
  for (const char* name : kNames) {
    if (void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* const error = dlerror();
    if (reason.empty()) reason = error != nullptr ? error : "unknown reason";
  }
  throw HttpError("MLflow needs libcurl.so.4, which cannot be loaded (", reason,
                  "): Debian package libcurl4 brings it");
}

template <class Function>
void find(void* handle, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) throw HttpError("libcurl.so.4 has no function ", name);
}

CurlLibrary load() {
  void* const handle = open_library();
  CurlLibrary curl;
  find(handle, curl.global_init, "curl_global_init");
  find(handle, curl.easy_init, "curl_easy_init");
  find(handle, curl.easy_setopt, "curl_easy_setopt");
  find(handle, curl.easy_perform, "curl_easy_perform");
  find(handle, curl.easy_getinfo, "curl_easy_getinfo");
  find(handle, curl.easy_reset, "curl_easy_reset");
  find(handle, curl.easy_cleanup, "curl_easy_cleanup");
  find(handle, curl.easy_strerror, "curl_easy_strerror");
  find(handle, curl.slist_append, "curl_slist_append");
  find(handle, curl.slist_free_all, "curl_slist_free_all");
  if (curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) throw HttpError("libcurl cannot be initialized");
  return curl;
}

}  // namespace

const CurlLibrary& curl_library() {
  static const CurlLibrary library = load();
  return library;
}

}  // namespace tessera
