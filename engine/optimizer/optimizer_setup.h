// Turns OptimizerConfig into what the sharded optimizer takes: a kind of update rule and, for each param
// group, its hyper-parameters.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "zero/kernels/kernels.h"

namespace tessera {

struct OptimizerSetup {
  kernels::OptimizerKind kind;
  std::vector<kernels::Hyper> groups;  ///< [0]: for parameters in no group; [i + 1]: param_groups[i]
  std::function<int(const std::string& parameter)> group_of;
};

/// `config`: as validated() has checked it.
OptimizerSetup set_up_optimizer(const OptimizerConfig& config);

/// Shell-style: `*` any run of characters, `?` one.
bool glob_match(const std::string& pattern, const std::string& name);

}  // namespace tessera
