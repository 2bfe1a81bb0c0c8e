// Comparing configurations: ranks with different ones would hang, or train something else.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "comm/communicator.h"

namespace tessera {

/// Collective. Compares a configuration as JSON, without the keys that may differ. Throws ConfigError, the
/// same on all ranks, with the keys that differ and both values: "seed is 42 on rank 0, but 43 on rank 1; …".
void check_same_config(comm::Communicator& comm, const nlohmann::ordered_json& mine);

}  // namespace tessera
