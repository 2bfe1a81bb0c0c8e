// CurlLibrary: libcurl, opened at run time. Only MLflow needs it, and Debian's brings Kerberos, LDAP and TLS
// along: programs that do without MLflow load none of them.
#pragma once

#include <curl/curl.h>

namespace tessera {

/// The functions of libcurl that http_client.cc calls.
struct CurlLibrary {
  decltype(&curl_global_init) global_init = nullptr;
  decltype(&curl_easy_init) easy_init = nullptr;
  decltype(&curl_easy_setopt) easy_setopt = nullptr;
  decltype(&curl_easy_perform) easy_perform = nullptr;
  decltype(&curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&curl_easy_reset) easy_reset = nullptr;
  decltype(&curl_easy_cleanup) easy_cleanup = nullptr;
  decltype(&curl_easy_strerror) easy_strerror = nullptr;
  decltype(&curl_slist_append) slist_append = nullptr;
  decltype(&curl_slist_free_all) slist_free_all = nullptr;
};

/// Opened and initialized at the first call, and never closed. Thread-safe. Throws HttpError naming
/// the package that brings libcurl.
const CurlLibrary& curl_library();

}  // namespace tessera
