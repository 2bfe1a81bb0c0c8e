#include "zero/gather_plan.h"

#include <algorithm>
#include <sstream>

#include "core/check.h"

namespace tessera::zero {
namespace {

/// Walks the trace once, holding the set of resident units.
class Planner {
 public:
  Planner(const Trace& trace, std::set<int> resident, const PlanBudget& budget)
      : trace_(trace), budget_(budget), resident_(std::move(resident)), uses_(budget.unit_numel.size()) {
    for (size_t p = 0; p < trace.size(); ++p) uses_[trace[p].unit].push_back(p);
    for (int unit : resident_) count(unit, +1);
  }

  GatherPlan run() {
    plan_.actions.resize(trace_.size());
    for (position_ = 0; position_ < trace_.size(); ++position_) {
      const int unit = trace_[position_].unit;
      if (!resident_.count(unit)) {
        make_room(unit, /*needed_at=*/position_, /*must=*/true);
        gather(unit);
      } else {
        shrink();
      }
      prefetch();
    }
    return std::move(plan_);
  }

 private:
  size_t next_use(int unit) const {
    const std::vector<size_t>& uses = uses_[unit];
    const auto found = std::upper_bound(uses.begin(), uses.end(), position_);
    return found == uses.end() ? trace_.size() : *found;
  }

  bool pinned(int unit) const {
    // Touched by the operator that runs at this position: itself, or an earlier stretch that reaches into it.
    const int64_t current = trace_[position_].first_operator;
    for (size_t p = position_ + 1; p-- > 0;) {
      if (trace_[p].last_operator < current) break;
      if (trace_[p].unit == unit) return true;
    }
    return false;
  }

  bool fits(int unit) const {
    return budget_.persistent[unit] || (num_live_ + 1 <= budget_.capacity_units &&
                                        live_numel_ + budget_.unit_numel[unit] <= budget_.capacity_numel);
  }

  /// Drops the units used farthest in the future until `unit` fits. Without `must`, only units whose next
  /// use lies behind `needed_at`.
  bool make_room(int unit, size_t needed_at, bool must) {
    std::vector<int> victims;
    const auto restore = [&] {
      for (int victim : victims) {
        resident_.insert(victim);
        count(victim, +1);
      }
    };
    while (!fits(unit)) {
      const int victim = farthest_behind(must ? 0 : needed_at);
      if (victim < 0) {
        if (!must) {
          restore();
          return false;
        }
        break;  // one operator needs more than the budget: correctness first
      }
      victims.push_back(victim);
      resident_.erase(victim);
      count(victim, -1);
    }
    for (int victim : victims) plan_release(victim);
    return true;
  }

  /// An operator before this one may have needed more than the budget: drops what is too much.
  void shrink() {
    while (num_live_ > budget_.capacity_units || live_numel_ > budget_.capacity_numel) {
      const int victim = farthest_behind(0);
      if (victim < 0) return;
      resident_.erase(victim);
      count(victim, -1);
      plan_release(victim);
    }
  }

  /// The unit used farthest in the future, and behind `position`, among those that may go; -1: none.
  int farthest_behind(size_t position) const {
    int found = -1;
    for (int candidate : resident_) {
      if (budget_.persistent[candidate] || pinned(candidate)) continue;
      const size_t use = next_use(candidate);
      if (use <= position) continue;
      position = use;
      found = candidate;
    }
    return found;
  }

  void plan_release(int victim) {
    plan_.actions[position_].push_back({PlanAction::kRelease, victim});
    scan_ = std::min(scan_, next_use(victim));
  }

  void gather(int unit) {
    plan_.actions[position_].push_back({PlanAction::kGather, unit});
    ++plan_.num_gathers;
    resident_.insert(unit);
    count(unit, +1);
  }

  void prefetch() {
    scan_ = std::max(scan_, position_ + 1);
    fetched_ahead_.erase(trace_[position_].unit);
    int64_t ahead_numel = 0;  // gathered but not used yet
    for (int unit : resident_) {
      if (fetched_ahead_.count(unit) && next_use(unit) < scan_) ahead_numel += budget_.unit_numel[unit];
    }
    for (; scan_ < trace_.size(); ++scan_) {
      const int unit = trace_[scan_].unit;
      if (resident_.count(unit)) continue;
      ahead_numel += budget_.unit_numel[unit];
      if (ahead_numel > budget_.prefetch_numel) return;
      if (!make_room(unit, scan_, /*must=*/false)) return;
      gather(unit);
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
  std::set<int> resident_;
  std::set<int> fetched_ahead_;
  std::vector<std::vector<size_t>> uses_;  // by unit: positions, ascending
  size_t position_ = 0;
  size_t scan_ = 0;  // everything before it is resident or already used
  int num_live_ = 0;
  int64_t live_numel_ = 0;
};

}  // namespace

GatherPlan make_plan(const Trace& trace, std::set<int> resident, const PlanBudget& budget) {
  return Planner(trace, std::move(resident), budget).run();
}

std::string serialize(const Trace& trace) {
  std::ostringstream out;
  for (const Touch& touch : trace) out << touch.unit << ' ' << touch.first_operator << ' ' << touch.last_operator << '\n';
  return out.str();
}

Trace parse_trace(const std::string& text) {
  std::istringstream in(text);
  Trace trace;
  for (Touch touch; in >> touch.unit >> touch.first_operator >> touch.last_operator;) trace.push_back(touch);
  TESSERA_CHECK(in.eof(), "not a trace: ", text.substr(0, 80));
  return trace;
}

}  // namespace tessera::zero
