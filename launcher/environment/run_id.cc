#include "launcher/environment/run_id.h"

#include <algorithm>
#include <string_view>

#include "core/random_digits.h"
#include "core/variables.h"

namespace tessera::launcher {
std::string new_run_id() { return random_digits(8); }

std::string new_run_secret(const std::vector<std::string>& variables) {
  constexpr std::string_view kFront = "TESSERA_RUN_SECRET=";
  const auto given = std::find_if(variables.begin(), variables.end(),
                                  [&](const std::string& variable) { return variable.starts_with(kFront); });
  const std::string secret = given != variables.end() ? given->substr(kFront.size())
                                                      : text_variable("TESSERA_RUN_SECRET").value_or("");
  return secret.empty() ? random_digits(16) : "";
}

}  // namespace tessera::launcher
