// The search of `tessera memory --fit`: the cheapest setting that fits, measured.
//
// [Note: what is cheapest]
// What lies on disk decides most of what a step costs; a higher stage costs next to nothing. So what lies on
// disk makes the rungs of a ladder, in the order of OnDisk. The first rung on which something fits has the
// answer. On a rung, in this order:
//
//   1. the wanted micro-batch without recomputation, at the lowest stage that fits;
//   2. at the highest stage, each policy of recomputation with the largest micro-batch that fits; a policy
//   that
//      recomputes more is slower, so it only counts where it has a larger micro-batch. The fastest as
//      measured is taken; of those that are as fast within the noise of that, the one that recomputes least.
//
// What was taken is run as `tessera train` does it, with evaluation and checkpoint. Where that needs too much
// it does not fit, and what comes next is taken; others of the rung are taken to need as much more in a run.
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
  Needed needed;              ///< measured; or by formula alone, where that is more than the limit
  bool is_whole_run = false;  ///< measured in a short run with evaluation and checkpoint
};

/// Who is told what the search does.
struct SearchObserver {
  std::function<void(const Setting&, bool is_whole_run)> begins;  ///< a trial
  std::function<void(const Tried&)> considered;
};

/// What was measured stays known when the space changes, so all spaces have the same model. Members throw
/// TrialFailed. `trials` must outlive it.
class FitSearch {
 public:
  FitSearch(SearchSpace space, FitTrials& trials, SearchObserver observer);
  void set_space(SearchSpace space) { space_ = std::move(space); }

  /// None if nothing fits.
  std::optional<Tried> cheapest();
  /// Whether a few steps of something fit on the last rung.
  bool something_may_fit();
  /// Whether the wanted micro-batch fits there with the most recomputation: in a short run, or by a few steps
  /// and what the last run needed more than those.
  bool wanted_batch_fits(bool in_a_run);
  /// What needs the least, up to a limit in place of the given one. None: all need more than that.
  std::optional<Tried> least(int64_t memory_limit);
  /// Of a setting that was considered, or null.
  const Tried* tried(const Setting& setting) const;
  /// Of those that were considered, the one with the least model state in memory. Requires: there is one.
  const Tried& least_state() const;
  /// The least that a rung needs on disk which was left out because of disk_limit; 0: none was.
  int64_t least_disk_missing() const { return disk_missing_; }

 private:
  struct Rung {
    OnDisk on_disk;
    std::vector<int> stages;  ///< each needs less memory than the one before
  };
  std::vector<Rung> ladder();
  Setting setting_of(int stage, OnDisk on_disk, const std::string& policy, int64_t micro_batch) const;
  std::vector<Setting> least_settings(const Rung& rung) const;
  bool may_fit(const Rung& rung);
  const Tried& consider(const Setting& setting);
  bool fits(const Setting& setting);
  bool fits_in_a_run(const Setting& setting);
  std::optional<Setting> cheapest_by_steps(const Rung& rung);
  std::optional<Setting> with_largest_micro_batch(const Rung& rung, const std::string& policy,
                                                  int64_t more_than);

  SearchSpace space_;
  FitTrials& trials_;
  SearchObserver observer_;
  std::map<Setting, Tried> tried_;
  int64_t run_extra_ = 0;  ///< what a run on this rung needs more than a few steps, as far as is known
  int64_t disk_missing_ = 0;
};

/// What is kept free for what a long run adds to `memory`: malloc keeps what is freed, and how much
/// depends on the order in which threads happen to run.
int64_t reserve_of(int64_t memory);
/// Whether it would exceed the limit if it went on growing for a hundred steps.
bool outgrows(const Needed& needed, int64_t limit);

}  // namespace tessera::tools
