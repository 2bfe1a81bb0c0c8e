// Numbers and words in columns, for what the commands print.
#pragma once

#include <string>

#include "core/str.h"

namespace tessera::tools {

inline std::string padded_left(const std::string& text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}
inline std::string padded_right(const std::string& text, size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}
/// "12.3" with one digit.
inline std::string fixed(double value, int digits) { return printed("%.*f", digits, value); }

}  // namespace tessera::tools
