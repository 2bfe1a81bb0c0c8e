// A model of which the number of parameters is known, and so its state's bytes at every stage and tier.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/log.h"
#include "engine/config/config.h"
#include "train/memory/state_formulas.h"
#include "zero/plan/memory_model.h"

namespace tessera::tools {

struct CountedModel : train::ModelCount {
  /// Groups of ranks, where the configuration forms them; see bytes_in_groups().
  zero::GroupSizes groups = {};
  std::string precision, optimizer;  ///< in words

  /// Bytes of one rank of `world` on `tier`, without padding. `one_copy_a_host`: see zero::StateModel.
  zero::StateBytes bytes(int stage, int64_t world, DType accumulate, zero::Tiers tiers = {},
                         zero::Tier tier = zero::Tier::kDevice, bool one_copy_a_host = false) const;
  /// The same in memory at stage 3, with `groups`, which divide `world`.
  zero::StateBytes bytes_in_groups(int64_t world, DType accumulate) const;
  /// Returns what zero::smallest_world returns for this model.
  int64_t smallest_world(int stage, zero::Tiers tiers, int64_t budget_bytes) const;
};

using train::kAllOnDisk, train::kAllOnHost, train::kOptimizerOnDisk, train::kOptimizerOnHost;

/// The number of fp32 state tensors of the optimizer.
int num_states_of(const OptimizerConfig& config);

/// Makes the configuration's model, in this process, on the CPU and without its memory, to count it.
/// `overrides`: as --set gives them. Throws ConfigError, DataError.
CountedModel count_model(const std::string& config, const std::vector<std::string>& overrides,
                         const Logger& log);

}  // namespace tessera::tools
