// What `tessera memory` prints and writes: a table, a chart, and files for other programs.
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
/// A line for every stage, rank and use: bytes between steps, at the peak, and by formula (empty where
/// there is no formula). Of what is on disk the uses begin with disk_.
std::string memory_csv(const MemoryTrials& trials);
/// An SVG picture for light and dark pages: stacked bars with the formula as a line, and one step of
/// each stage over time.
std::string memory_chart(const MemoryTrials& trials);

/// Returns the rank with the greatest peak of each stage, in the order of stages.
std::vector<const train::MemoryTrial*> largest_by_stage(const MemoryTrials& trials);

}  // namespace tessera::tools
