// Whether this process may open as many files as a group of ranks needs.
#pragma once

#include <string>

namespace tessera::comm {

/// Local. Throws CommError when the limit of open files (ulimit -n) leaves fewer than a group of `world_size`
/// ranks takes on this one, which serves the store or does not. Asked before the first socket: a thread of a
/// library that finds none left says nothing, or hangs.
void check_open_files(int world_size, bool serves, const std::string& backend);

}  // namespace tessera::comm
