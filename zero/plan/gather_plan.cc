#include "zero/plan/gather_plan.h"

#include <algorithm>

#include "core/check.h"

namespace tessera::zero {
namespace {

/// Walks the trace once, holding the set of unsharded units.
class Planner {
 public:
  Planner(const Trace& trace, std::set<int> unsharded, const PlanBudget& budget)
      : trace_(trace), budget_(budget), unsharded_(std::move(unsharded)), uses_(budget.unit_numel.size()) {
    for (size_t p = 0; p < trace.size(); ++p) uses_[trace[p].unit].push_back(p);
    for (int unit : unsharded_) count(unit, +1);
  }

  GatherPlan run() {
    plan_.actions.resize(trace_.size());
    for (position_ = 0; position_ < trace_.size(); ++position_) {
      const int unit = trace_[position_].unit;
      if (!unsharded_.contains(unit)) {
        make_room(unit, position_);
        unshard(unit);
      } else {
        shrink();
      }
      prefetch();
    }
    return std::move(plan_);
  }

 private:
  /// Position of the unit's first use behind `position`; the trace's end when there is none.
  size_t next_use(int unit, size_t position) const {
    const std::vector<size_t>& uses = uses_[unit];
    const auto found = std::upper_bound(uses.begin(), uses.end(), position);
    return found == uses.end() ? trace_.size() : *found;
  }
  size_t next_use(int unit) const { return next_use(unit, position_); }

  /// Touched by the operator that runs at `position`: itself, or an earlier stretch that reaches into it.
  bool pinned(int unit, size_t position) const {
    const int64_t current = trace_[position].first_operator;
    for (size_t p = position + 1; p-- > 0;) {
      if (trace_[p].last_operator < current) break;
      if (trace_[p].unit == unit) return true;
    }
    return false;
  }

  bool fits(int unit) const {
    return budget_.persistent[unit] || (num_live_ + 1 <= budget_.capacity_units &&
                                        live_numel_ + budget_.unit_numel[unit] <= budget_.capacity_numel);
  }

  bool over_budget() const {
    return num_live_ > budget_.capacity_units || live_numel_ > budget_.capacity_numel;
  }

  /// Not used from now until `position`: can go as well now as then.
  bool idle_until(int unit, size_t position) const {
    return !pinned(unit, position_) && next_use(unit) >= position;
  }

  /// The unit that has to go at `position`: of those that may, the one used farthest in the future; of those
  /// never used again one that is idle. -1: none may.
  int victim_at(size_t position) const {
    int victim = -1;
    std::pair<size_t, bool> best{0, false};
    for (int candidate : unsharded_) {
      if (budget_.persistent[candidate] || pinned(candidate, position)) continue;
      const std::pair<size_t, bool> rank{next_use(candidate, position), idle_until(candidate, position)};
      if (rank <= best) continue;
      best = rank;
      victim = candidate;
    }
    return victim;
  }

  /// Drops units until `unit`, needed at `needed_at`, fits. Everything used until then is
  /// unsharded already. A prefetch drops what would have to go then, and only if it is not used
  /// until then; otherwise returns false.
  bool make_room(int unit, size_t needed_at) {
    const bool prefetch = needed_at > position_;
    std::vector<int> victims;
    while (!fits(unit)) {
      const int victim = victim_at(needed_at);
      if (prefetch && (victim < 0 || !idle_until(victim, needed_at))) {
        for (int taken : victims) {
          unsharded_.insert(taken);
          count(taken, +1);
        }
        return false;
      }
      if (victim < 0) break;  // one operator needs more than the budget: correctness first
      victims.push_back(victim);
      unsharded_.erase(victim);
      count(victim, -1);
    }
    for (int victim : victims) plan_reshard(victim);
    return true;
  }

  /// An operator before this one may have needed more than the budget: drops what is too much.
  void shrink() {
    while (over_budget()) {
      const int victim = victim_at(position_);
      if (victim < 0) return;
      unsharded_.erase(victim);
      count(victim, -1);
      plan_reshard(victim);
    }
  }

  void plan_reshard(int victim) {
    plan_.actions[position_].push_back({PlanAction::kReshard, victim});
    scan_ = std::min(scan_, next_use(victim));
  }

  void unshard(int unit) {
    plan_.actions[position_].push_back({PlanAction::kUnshard, unit});
    ++plan_.num_gathers;
    unsharded_.insert(unit);
    count(unit, +1);
  }

  void prefetch() {
    if (over_budget()) return;
    scan_ = std::max(scan_, position_ + 1);
    fetched_ahead_.erase(trace_[position_].unit);
    int64_t ahead_numel = 0;  // gathered but not used yet
    for (int unit : unsharded_) {
      if (fetched_ahead_.contains(unit) && next_use(unit) < scan_) ahead_numel += budget_.unit_numel[unit];
    }
    for (; scan_ < trace_.size(); ++scan_) {
      const int unit = trace_[scan_].unit;
      if (unsharded_.contains(unit)) continue;
      ahead_numel += budget_.unit_numel[unit];
      if (ahead_numel > budget_.prefetch_numel) return;
      if (!make_room(unit, scan_)) return;
      unshard(unit);
      fetched_ahead_.insert(unit);
    }
  }

  void count(int unit, int sign) {
    if (budget_.persistent[unit]) return;
    num_live_ += sign;
    live_numel_ += sign * budget_.unit_numel[unit];
  }

  const Trace& trace_;
  const PlanBudget& budget_;
  GatherPlan plan_;
  std::set<int> unsharded_;
  std::set<int> fetched_ahead_;
  std::vector<std::vector<size_t>> uses_;  // by unit: positions, ascending
  size_t position_ = 0;
  size_t scan_ = 0;  // everything before it is unsharded or already used
  int num_live_ = 0;
  int64_t live_numel_ = 0;
};

}  // namespace

GatherPlan make_plan(const Trace& trace, std::set<int> unsharded, const PlanBudget& budget) {
  return Planner(trace, std::move(unsharded), budget).run();
}

}  // namespace tessera::zero
