// Lower-casing of ASCII letters, for comparisons that ignore case.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Bytes other than A to Z are unchanged.
inline std::string ascii_lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return lower;
}

}  // namespace tessera
