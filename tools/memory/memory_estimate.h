// `tessera memory --estimate`: the bytes of model state at every stage by formula, and the worlds in which
// they fit.
#pragma once

#include <string>
#include <vector>

#include "core/log.h"
#include "tools/memory/counted_model.h"
#include "zero/plan/mesh.h"

namespace tessera::tools {

struct EstimateFlags {
  std::string params;            ///< "7.5B"; empty: the configuration's model is counted
  int world = 0;                 ///< ranks; 0: not given
  std::string optimizer;         ///< empty: AdamW
  std::string precision;         ///< empty: bf16
  std::string fit;               ///< a size such as "80GB"; empty: not asked
  zero::GroupSizes groups = {};  ///< of the model of `params`; a configuration has its own
};

/// Prints the estimate for the model of the JSON file `config` (with `overrides`, as --set gives
/// them), or of `flags.params` parameters where `config` is empty, and returns that model. Throws
/// ConfigError.
CountedModel print_memory_estimate(const std::string& config, const std::vector<std::string>& overrides,
                                   const EstimateFlags& flags, const Logger& log);

}  // namespace tessera::tools
