// The tasks the `tessera` command knows.
#pragma once

#include "train/task/registry.h"

namespace tessera::tools {

/// The examples' tasks and predictors, by their names in a configuration.
train::Registry tasks();

}  // namespace tessera::tools
