// What `tessera memory` shows: a table, a chart, and files for other programs. No measuring here.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/memory_trial.h"

namespace tessera::tools {

/// By stage: one trial of each rank, at least one.
using MemoryTrials = std::map<int, std::vector<train::MemoryTrial>>;

/// Local. At most 80 columns: what a rank holds at its peak, use by use, beside
/// the formula; bars; lines end in \n.
std::string memory_table(const MemoryTrials& trials);
/// Local. Everything measured.
nlohmann::ordered_json memory_json(const MemoryTrials& trials);
/// Local. A line for every stage, rank and use: bytes between steps, at the peak,
/// and by formula (empty: it has none).
std::string memory_csv(const MemoryTrials& trials);
/// Local. A self-contained SVG picture, for light and dark pages: stacked bars with the formula as a line,
/// and each stage's time line of one step.
std::string memory_chart(const MemoryTrials& trials);

/// Local. Of each stage the rank with the greatest peak, in the order of stages.
std::vector<const train::MemoryTrial*> largest_by_stage(const MemoryTrials& trials);

}  // namespace tessera::tools
