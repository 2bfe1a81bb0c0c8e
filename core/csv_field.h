// A field of RFC 4180, as Python's csv module (QUOTE_MINIMAL) writes it.
#pragma once

#include <string>

namespace tessera {

/// Returns the text as a field of a row: in quotes if it holds a comma, a quote or a line break.
inline std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

}  // namespace tessera
