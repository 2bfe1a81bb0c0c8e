// Comparing what ranks must have alike: configurations, without which they would hang or train something
// else, and the options that they step with. A script may set those by what its rank alone knows, such as the
// loss of its own batch; then shards, or copies, of one model would go apart without a word.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "zero/kernels/hyper.h"

namespace tessera {

/// Collective. Compares a configuration as JSON, without the keys that may differ. Throws ConfigError, the
/// same on all ranks, with the keys that differ and both values: "seed is 42 on rank 0, but 43 on rank 1; …".
void check_same_config(comm::Communicator& comm, const nlohmann::ordered_json& mine);

/// Equal where all options of all groups are. An integer below 2^52, so that it can be sent as a double.
double digest_of(const std::vector<kernels::Hyper>& groups);

/// Collective, after digests have differed. The first difference from rank 0: "param group 1 has lr 0.1 on
/// rank 0, but 0.01 on rank 2".
std::string first_difference(comm::Communicator& comm, const std::vector<kernels::Hyper>& groups);

}  // namespace tessera
