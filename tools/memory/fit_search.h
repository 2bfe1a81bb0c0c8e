// The search of `tessera memory --fit`: the cheapest setting that fits, measured.
//
// [Note: what is cheapest]
// State in memory is cheaper than on disk, and little of it on disk cheaper than much, as OnDisk is ordered.
// A higher stage costs next to nothing. So the search takes what lies on disk as its outer loop, and there
// first raises the stage. If that is not enough, each policy of recomputation gets the largest micro-batch
// with which it fits; more recomputation is only considered with a larger micro-batch, since otherwise it is
// slower. Of these settings the fastest is chosen, by the time of a step as measured; of those that are as
// fast within the noise of that, the one with the least recomputation. What is chosen is measured again in a
// short run, which evaluates and saves. If that needs too much, other settings are taken to need as much more
// in a run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/memory/fit_setting.h"
#include "tools/memory/fit_trials.h"

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
  int64_t growth = 0;         ///< of memory, with each step of that run
  bool disk_too_small = false;
  double step_ms = 0;  ///< 0: not measured
};

/// Who is told what the search does.
struct SearchObserver {
  std::function<void(const Setting&, bool is_whole_run)> begins;  ///< a trial
  std::function<void(const Tried&)> considered;
};

class FitSearch {
 public:
  /// `trials` must outlive it.
  FitSearch(SearchSpace space, FitTrials& trials, SearchObserver observer);
  /// What was measured stays known, so the model and the limits must be the same.
  void set_space(SearchSpace space) { space_ = std::move(space); }

  /// None if nothing fits. Throws TrialFailed, as all members.
  std::optional<Tried> cheapest();
  /// Whether something may fit: with the most on disk something does.
  bool something_may_fit() { return may_fit(most_on_disk()); }
  /// With the first micro-batch of the space and this policy, what has the most on disk; in a run too
  /// if `runs`. None if it does not fit.
  std::optional<Tried> with_most_room(const std::string& policy, bool runs);
  /// The setting that needs the least, and what it needs, up to a limit in place of the given one;
  /// is_more: all need more than that.
  Tried least(int64_t memory_limit);
  /// Of a setting that was considered, or null.
  const Tried* tried(const Setting& setting) const;
  /// Of the settings that were left out because of disk_limit, the least that one needs on disk; 0:
  /// none was left out.
  int64_t least_disk_missing() const { return disk_missing_; }

  /// Whether the last run needed more with each step.
  bool last_run_grew() const { return last_run_grew_; }

 private:
  std::vector<int> stages_for(OnDisk on_disk) const;
  Setting setting_of(int stage, OnDisk on_disk, const std::string& policy, int64_t micro_batch) const;
  std::vector<Setting> least_settings(OnDisk on_disk) const;
  bool may_fit(OnDisk on_disk);
  std::vector<OnDisk> choices() const;
  bool has_room_on_disk(const Setting& setting);
  OnDisk most_on_disk();
  const Tried& consider(const Setting& setting);
  bool fits(const Tried& tried) const;
  bool fits(const Setting& setting) { return fits(consider(setting)); }
  bool holds_in_a_run(const Setting& setting);
  std::optional<Tried> cheapest_with(OnDisk on_disk);
  std::optional<Tried> cheapest_by_steps(OnDisk on_disk);
  std::optional<Tried> with_largest_micro_batch(int stage, OnDisk on_disk, const std::string& policy,
                                                int64_t more_than);

  SearchSpace space_;
  FitTrials& trials_;
  SearchObserver observer_;
  std::map<Setting, Tried> tried_;
  int64_t run_extra_ = 0;  ///< what a run with the same state on disk needs more than a few steps
  bool last_run_grew_ = false;
  int64_t disk_missing_ = 0;
};

/// What is kept free for what a long run adds to `memory`: malloc keeps what is freed, and how much
/// depends on the order in which threads happen to run.
int64_t reserve_of(int64_t memory);
/// Whether `memory` and its reserve stay within the limit.
bool is_within(int64_t memory, int64_t limit);
/// Whether it would exceed the limit if it went on growing for a hundred steps.
bool outgrows(const Tried& tried, int64_t limit);

}  // namespace tessera::tools
