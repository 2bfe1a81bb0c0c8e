// What `tessera memory` prints and writes: a table, and a file for other programs.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/memory_trial.h"

namespace tessera::tools {

/// Has the trials of a stage, one of each rank and at least one, by stage.
using MemoryTrials = std::map<int, std::vector<train::MemoryTrial>>;

/// What a rank holds at its peak by use, next to the formula, what it has on disk, and bars. In
/// `width` columns, at least 54; lines end in \n.
std::string memory_table(const MemoryTrials& trials, int width);
/// Everything measured.
nlohmann::ordered_json memory_json(const MemoryTrials& trials);

}  // namespace tessera::tools
