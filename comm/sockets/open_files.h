// The limit of open files, and what a group of ranks needs.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm {

/// About how many files a rank of a group of `world_size` ranks has open for it.
int64_t files_of_group(int world_size, bool serves_store, const std::string& backend);

/// Raises this process's limit of open files (ulimit -n) to the hard one: strangers who connect take some,
/// and Gloo ends the process when it finds none left. Throws CommError when that leaves fewer than this rank
/// needs in a group of `world_size` ranks. To be called before the first socket is made: a library whose
/// thread finds none left fails without a message, or hangs.
void raise_open_files(int world_size, bool serves_store, const std::string& backend);

}  // namespace tessera::comm
