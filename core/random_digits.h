// Random hexadecimal digits for names and secrets that nobody else can guess.
#pragma once

#include <cstddef>
#include <string>

namespace tessera {

/// Two digits (0-9, a-f) for each of `num_bytes` (up to 256), from the system's generator. Throws
/// Error when the system has none.
std::string random_digits(size_t num_bytes);

}  // namespace tessera
