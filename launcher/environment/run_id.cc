#include "launcher/environment/run_id.h"

#include <algorithm>
#include <cstdlib>

#include "core/random_digits.h"

namespace tessera::launcher {
std::string new_run_id() { return random_digits(8); }

std::string new_run_secret(const std::vector<std::string>& variables) {
  const bool given = std::any_of(variables.begin(), variables.end(), [](const std::string& variable) {
    return variable.starts_with("TESSERA_RUN_SECRET=");
  });
  return given || std::getenv("TESSERA_RUN_SECRET") != nullptr ? "" : random_digits(16);
}

}  // namespace tessera::launcher
