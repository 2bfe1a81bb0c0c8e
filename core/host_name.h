// The name of this host.
#pragma once

#include <string>

namespace tessera {

/// As the kernel has it, gethostname(2); "localhost" where it has none.
std::string host_name();

}  // namespace tessera
