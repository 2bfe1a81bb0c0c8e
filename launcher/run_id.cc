#include "launcher/run_id.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/error.h"

namespace tessera::launcher {
namespace {

/// Two hexadecimal digits a byte.
template <size_t Size>
std::string random_digits() {
  unsigned char bytes[Size] = {};
  if (::getrandom(bytes, Size, 0) != Size) throw CommError("the system has no random numbers (getrandom)");
  std::string digits;
  for (const unsigned char byte : bytes) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", byte);
    digits += hex;
  }
  return digits;
}

}  // namespace

std::string new_run_id() { return random_digits<8>(); }

std::string new_run_secret(const std::vector<std::string>& variables) {
  const bool given = std::any_of(variables.begin(), variables.end(), [](const std::string& variable) {
    return variable.starts_with("TESSERA_RUN_SECRET=");
  });
  return given || std::getenv("TESSERA_RUN_SECRET") != nullptr ? "" : random_digits<16>();
}

}  // namespace tessera::launcher
