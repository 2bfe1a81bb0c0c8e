// Checks the address of an HTTP server.
#pragma once

#include <string>

namespace tessera {

/// "http://HOST…" or "https://HOST…", without user name and password, because addresses are written
/// into files and logs.
inline bool is_http_url(const std::string& url) {
  if (url.find('@') != url.npos) return false;
  return (url.starts_with("http://") && url.size() > 7) || (url.starts_with("https://") && url.size() > 8);
}

}  // namespace tessera
