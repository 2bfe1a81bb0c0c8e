// The current time in the form that monitors write.
#pragma once

#include <chrono>

namespace tessera {

/// Seconds since 1970.
inline double wall_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tessera
