// Addresses of HTTP servers in configurations and in the environment.
#pragma once

#include <string>

namespace tessera {

/// Local. "http://HOST…" or "https://HOST…", without a user's name or password: addresses are written into
/// files and logs.
inline bool is_http_url(const std::string& url) {
  if (url.find('@') != url.npos) return false;
  return (url.starts_with("http://") && url.size() > 7) || (url.starts_with("https://") && url.size() > 8);
}

}  // namespace tessera
