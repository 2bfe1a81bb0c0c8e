#include "core/variables.h"

#include <cstdlib>

#include "core/parse_number.h"

namespace tessera {

std::optional<std::string> text_variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int> integer_variable(const char* name) {
  return parse_number<int>(text_variable(name).value_or(""));
}

}  // namespace tessera
