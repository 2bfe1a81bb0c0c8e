// The page of memory: one HTML file without anything from elsewhere, for a person to look at. Its text is
// memory_page.html; this writes the numbers into it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "train/memory_trial.h"

namespace tessera::train {

/// What was measured in one setting.
struct MeasuredRun {
  std::string label;  ///< "stage 2"
  MemoryTrial trial;
  nlohmann::ordered_json timeline = {};  ///< timeline_json(), or null
};

struct MemoryPage {
  std::vector<MeasuredRun> runs = {};      ///< by stage; none: the page has the formulas alone
  std::vector<MeasuredRun> variants = {};  ///< of one of the runs, with something changed
  ModelCount model = {};
  std::string optimizer = {};
  int world_size = 1;
  int stage = 0;            ///< the configuration's: at which the page begins
  bool is_complete = true;  ///< false: of what was there before the record only model state is known
  bool in_groups =
      false;  ///< mics_shard_size or zero_hpz_partition_size: what the page computes has no groups
  std::optional<int64_t> limit = {};  ///< of a rank's memory, in bytes, at which the page begins
};

std::string memory_page_html(const MemoryPage& page);

}  // namespace tessera::train
