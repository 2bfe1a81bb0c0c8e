// The name of this host.
#pragma once

#include <unistd.h>

#include <string>

namespace tessera {

/// As the kernel has it, gethostname(2); "localhost" where it has none.
inline std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

}  // namespace tessera
