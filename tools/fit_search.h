// The search of `tessera memory --fit`: the cheapest setting that fits, measured.
//
// [Note: what is cheapest]
// State in memory is cheaper than on disk, and little of it on disk cheaper than much, as OnDisk is ordered.
// A higher stage costs next to nothing. So the search takes what lies on disk as its outer loop, and there
// first raises the stage. If that is not enough, each policy of recomputation gets the largest micro-batch
// with which it fits; of these settings the fastest is chosen, by the time of a step as measured.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/fit_setting.h"
#include "tools/fit_trials.h"

namespace tessera::tools {

/// What may be chosen from.
struct SearchSpace {
  std::vector<int> stages;             ///< ascending
  std::vector<std::string> policies;   ///< from the least recomputation to the most
  std::vector<int64_t> micro_batches;  ///< descending; the first is the one that is wanted
  int64_t samples_of_a_step = 1;       ///< of one rank
  int world = 1;
  bool disk = true;         ///< whether state may lie on disk
  bool small_units = true;  ///< whether OnDisk::kAllSmallUnits makes units smaller than they are
  int64_t memory_limit = 0;
  int64_t disk_limit = 0;
  /// Bytes of model state by formula, of all ranks on this host.
  std::function<int64_t(const Setting&, zero::Tier)> state_bytes;
};

/// A setting that was considered.
struct Tried {
  Setting setting;
  int64_t memory = 0;         ///< measured, or a bound if is_more
  bool is_more = false;       ///< it needs more than `memory`
  bool is_whole_run = false;  ///< measured in a short run with evaluation and checkpoint
  bool grows = false;         ///< in that run memory became more with each step
  bool disk_too_small = false;
  double step_ms = 0;  ///< 0: not measured
  bool fits = false;
};

class FitSearch {
 public:
  /// `trials` must outlive it. `report` gets each setting that is considered.
  FitSearch(SearchSpace space, FitTrials& trials, std::function<void(const Tried&)> report);

  /// Local. None if nothing fits. Throws TrialFailed, as all members.
  std::optional<Tried> cheapest();
  /// Local. Whether something may fit: what needs the least does.
  bool least_fits();
  /// Local. The setting that needs the least, and what it needs, up to a limit in place of the given one;
  /// is_more: all need more than that.
  Tried least(int64_t memory_limit);
  /// Local. Of a setting that was considered, or null.
  const Tried* tried(const Setting& setting) const;
  /// Local. Of the settings that were left out because of disk_limit, the least that one needs on disk; 0:
  /// none was left out.
  int64_t least_disk_missing() const { return disk_missing_; }

 private:
  std::vector<int> stages_for(OnDisk on_disk) const;
  Setting setting_of(int stage, OnDisk on_disk, const std::string& policy, int64_t micro_batch) const;
  std::vector<Setting> least_settings(OnDisk on_disk) const;
  bool may_fit(OnDisk on_disk);
  std::vector<OnDisk> choices() const;
  const Tried& consider(const Setting& setting);
  bool holds_in_a_run(const Setting& setting);
  std::optional<Tried> cheapest_with(OnDisk on_disk);
  std::optional<Tried> best_of(std::vector<Tried> finalists);
  std::optional<Tried> with_largest_micro_batch(int stage, OnDisk on_disk, const std::string& policy);

  SearchSpace space_;
  FitTrials& trials_;
  std::function<void(const Tried&)> report_;
  std::map<Setting, Tried> tried_;
  int64_t disk_missing_ = 0;
};

/// Local. Whether what was measured stays within the limit, with a few percent for what a long run adds.
bool is_within(int64_t memory, int64_t limit);

}  // namespace tessera::tools
