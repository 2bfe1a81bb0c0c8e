// Ranks that go by other configurations would hang, or compute what nobody asked for.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "comm/communicator.h"

namespace tessera {

/// Collective. Compares a configuration as JSON, less what a rank may have to itself. Throws
/// ConfigError, on all ranks in the same words, with the keys that differ and both values: "seed
/// is 42 on rank 0, but 43 on rank 1; …".
void check_same_config(comm::Communicator& comm, const nlohmann::ordered_json& mine);

}  // namespace tessera
