#include "core/variables.h"

#include "core/parse_number.h"

namespace tessera {

std::optional<int> integer_variable(const char* name) {
  return parse_number<int>(text_variable(name).value_or(""));
}

}  // namespace tessera
