// Which ranks of this host have ended with exit code 0, from the launcher to those that wait for them at the
// rendezvous. A rank that ended in another way has failed, and the launcher ends the others itself.
#pragma once

#include <string>
#include <vector>

namespace tessera {

/// Adds a rank. `error_file`: TESSERA_ERROR_FILE of any rank; what is written lies beside it. Never throws.
void add_ended_rank(const std::string& error_file, int rank) noexcept;

/// The ranks that the launcher which gave this process TESSERA_ERROR_FILE has added. Empty without one.
std::vector<int> ended_ranks();

}  // namespace tessera
