#include "core/random_digits.h"

#include <sys/random.h>

#include <vector>

#include "core/check.h"
#include "core/error.h"

namespace tessera {

std::string random_digits(size_t num_bytes) {
  TESSERA_CHECK(num_bytes <= 256, num_bytes, " bytes");  // up to here no signal interrupts the call
  std::vector<unsigned char> bytes(num_bytes);
  if (::getrandom(bytes.data(), num_bytes, 0) != static_cast<ssize_t>(num_bytes))
    throw Error("the system has no random numbers (getrandom)");
  std::string digits;
  for (const unsigned char byte : bytes) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

}  // namespace tessera
