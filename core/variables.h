// The environment variables of this process.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

#include "core/parse_number.h"

namespace tessera {

/// The value of a variable; nullopt where it is unset or empty. `export NAME=$OTHER`, a container's list and
/// a job's file leave empty ones, which mean that nothing was said.
inline std::optional<std::string> text_variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

/// The value of a variable that is a decimal integer; nullopt if it is unset or anything else.
inline std::optional<int> integer_variable(const char* name) {
  return parse_number<int>(text_variable(name).value_or(""));
}

/// Sets a variable that has no value.
inline void set_default_variable(const char* name, const char* value) {
  if (!text_variable(name)) ::setenv(name, value, /*overwrite=*/1);
}

}  // namespace tessera
