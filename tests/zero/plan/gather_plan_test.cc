// Plans are simulated: every operator finds its units, the budget is kept, and the number of gathers is
// minimal.
#include "zero/plan/gather_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>

namespace tessera::zero {
namespace {

/// A trace as Residency records it: one operator after another, each touching the units given.
Trace trace_of(const std::vector<std::vector<int>>& operators) {
  Trace trace;
  for (int64_t number = 0; number < static_cast<int64_t>(operators.size()); ++number) {
    for (int unit : operators[number]) {
      if (!trace.empty() && trace.back().unit == unit) {
        trace.back().last_operator = number;
      } else {
        trace.push_back({unit, number, number});
      }
    }
  }
  return trace;
}

Trace one_by_one(const std::vector<int>& units) {
  std::vector<std::vector<int>> operators;
  for (int unit : units) operators.push_back({unit});
  return trace_of(operators);
}

std::vector<int> forward_backward(int num_units) {
  std::vector<int> units;
  for (int unit = 0; unit < num_units; ++unit) units.push_back(unit);
  for (int unit = num_units - 1; unit >= 0; --unit) units.push_back(unit);
  return units;
}

PlanBudget budget_of(int num_units, int capacity, int64_t prefetch_numel) {
  PlanBudget budget;
  budget.capacity_units = capacity;
  budget.prefetch_numel = prefetch_numel;
  budget.unit_numel.assign(num_units, 10);
  budget.persistent.assign(num_units, false);
  return budget;
}

/// Units that the operator at `position` has touched so far, which must not be released.
std::set<int> pinned_at(const Trace& trace, size_t position) {
  std::set<int> pinned;
  for (size_t p = 0; p <= position; ++p)
    if (trace[p].last_operator >= trace[position].first_operator) pinned.insert(trace[p].unit);
  return pinned;
}

/// Replays a plan; returns how often each unit was gathered.
std::map<int, int> simulate(const Trace& trace, std::set<int> unsharded, const PlanBudget& budget,
                            const GatherPlan& plan) {
  std::map<int, int> gathers;
  int total = 0;
  const auto live = [&](const std::set<int>& units) {
    return std::count_if(units.begin(), units.end(), [&](int unit) { return !budget.persistent[unit]; });
  };
  EXPECT_EQ(plan.actions.size(), trace.size());
  for (size_t p = 0; p < trace.size(); ++p) {
    const std::set<int> pinned = pinned_at(trace, p);
    for (const PlanAction& action : plan.actions[p]) {
      if (action.kind == PlanAction::kUnshard) {
        EXPECT_TRUE(unsharded.insert(action.unit).second)
            << "unit " << action.unit << " is there already, at " << p;
        ++gathers[action.unit];
        ++total;
      } else {
        EXPECT_EQ(unsharded.erase(action.unit), 1u) << "unit " << action.unit << " is not there, at " << p;
        EXPECT_FALSE(pinned.count(action.unit)) << "unit " << action.unit << " is in use at " << p;
        EXPECT_FALSE(budget.persistent[action.unit]);
      }
    }
    EXPECT_TRUE(unsharded.count(trace[p].unit)) << "unit " << trace[p].unit << " is missing at " << p;
    EXPECT_LE(live(unsharded), std::max<int64_t>(budget.capacity_units, live(pinned))) << "at " << p;
  }
  EXPECT_EQ(total, plan.num_gathers);
  return gathers;
}

/// The fewest gathers of any policy: tries every choice of the unit to release.
int fewest_gathers(const Trace& trace, size_t capacity) {
  std::map<std::set<int>, int> states{{{}, 0}};
  for (const Use& use : trace) {
    std::map<std::set<int>, int> next;
    const auto reach = [&](const std::set<int>& unsharded, int gathers) {
      const auto [entry, is_new] = next.try_emplace(unsharded, gathers);
      if (!is_new) entry->second = std::min(entry->second, gathers);
    };
    for (const auto& [unsharded, gathers] : states) {
      std::set<int> with = unsharded;
      if (!with.insert(use.unit).second) {
        reach(unsharded, gathers);
      } else if (with.size() <= capacity) {
        reach(with, gathers + 1);
      } else {
        for (int victim : unsharded) {
          std::set<int> swapped = with;
          swapped.erase(victim);
          reach(swapped, gathers + 1);
        }
      }
    }
    states = std::move(next);
  }
  int fewest = INT32_MAX;
  for (const auto& [unsharded, gathers] : states) fewest = std::min(fewest, gathers);
  return fewest;
}

std::vector<int> random_units(std::mt19937& random, int num_units, int length) {
  std::vector<int> units;
  for (int i = 0; i < length; ++i) units.push_back(static_cast<int>(random() % num_units));
  return units;
}

TEST(GatherPlan, GathersAsSeldomAsPossible) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 400; ++trial) {
    SCOPED_TRACE(trial);
    const Trace trace = one_by_one(random_units(random, 6, 16));
    for (int capacity = 1; capacity <= 4; ++capacity) {
      const int fewest = fewest_gathers(trace, capacity);
      for (int64_t prefetch : {0, 10, 25, 1000}) {  // fetching ahead must not cost a gather
        const PlanBudget budget = budget_of(6, capacity, prefetch);
        const GatherPlan plan = make_plan(trace, {}, budget);
        simulate(trace, {}, budget, plan);
        EXPECT_EQ(plan.num_gathers, fewest) << "capacity " << capacity << " prefetch " << prefetch;
      }
    }
  }
}

TEST(GatherPlan, OperatorsThatNeedSeveralUnits) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 1'000; ++trial) {
    SCOPED_TRACE(trial);
    std::vector<std::vector<int>> operators;
    for (int i = 0; i < 12; ++i)
      operators.push_back(random_units(random, 7, 1 + static_cast<int>(random() % 4)));
    const Trace trace = trace_of(operators);
    const PlanBudget with = budget_of(7, 1 + static_cast<int>(random() % 4), 30);
    PlanBudget without = with;
    without.prefetch_numel = 0;
    std::set<int> unsharded;
    for (int unit = 0; unit < 7; ++unit)
      if (random() % 4 == 0) unsharded.insert(unit);
    const GatherPlan plan = make_plan(trace, unsharded, with);
    simulate(trace, unsharded, with, plan);
    const GatherPlan on_demand = make_plan(trace, unsharded, without);
    simulate(trace, unsharded, without, on_demand);
    EXPECT_LE(plan.num_gathers, on_demand.num_gathers);
  }
}

TEST(GatherPlan, TheBudgetOfElementsCountsToo) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const Trace trace = one_by_one(random_units(random, 6, 20));
    PlanBudget budget = budget_of(6, 5, 40);
    budget.unit_numel = {5, 10, 20, 10, 5, 30};
    budget.capacity_numel = 45;
    const GatherPlan plan = make_plan(trace, {}, budget);
    std::set<int> unsharded;
    for (size_t p = 0; p < trace.size(); ++p) {
      for (const PlanAction& action : plan.actions[p]) {
        if (action.kind == PlanAction::kUnshard) unsharded.insert(action.unit);
        if (action.kind == PlanAction::kReshard) unsharded.erase(action.unit);
      }
      int64_t numel = 0;
      for (int unit : unsharded) numel += budget.unit_numel[unit];
      EXPECT_LE(numel, budget.capacity_numel) << "at " << p;
      EXPECT_TRUE(unsharded.count(trace[p].unit));
    }
  }
}

TEST(GatherPlan, ForwardThenBackwardGathersEachUnitAtMostTwice) {
  for (int num_units : {1, 2, 3, 8, 40}) {
    const Trace trace = one_by_one(forward_backward(num_units));
    for (int capacity : {2, 3, 5}) {
      for (int64_t prefetch : {0, 20, 1000}) {
        const PlanBudget budget = budget_of(num_units, capacity, prefetch);
        for (const auto& [unit, times] : simulate(trace, {}, budget, make_plan(trace, {}, budget)))
          EXPECT_LE(times, 2) << "unit " << unit;
      }
    }
  }
}

TEST(GatherPlan, FetchesAheadWithinItsBudget) {
  const Trace trace = one_by_one({0, 1, 2, 3, 4, 5});
  const GatherPlan plan = make_plan(trace, {}, budget_of(6, 10, 20));
  using Actions = std::vector<PlanAction>;
  EXPECT_EQ(plan.actions[0],
            (Actions{{PlanAction::kUnshard, 0}, {PlanAction::kUnshard, 1}, {PlanAction::kUnshard, 2}}));
  EXPECT_EQ(plan.actions[1], (Actions{{PlanAction::kUnshard, 3}}));
  EXPECT_EQ(make_plan(trace, {}, budget_of(6, 10, 0)).actions[0], (Actions{{PlanAction::kUnshard, 0}}));
}

TEST(GatherPlan, BackwardIsFetchedAheadToo) {
  // Room for three: one is in use and the next in flight, so only where the order turns are units already
  // there.
  const Trace trace = one_by_one(forward_backward(8));
  const GatherPlan plan = make_plan(trace, {}, budget_of(8, 3, 1000));
  for (size_t p = 1; p < trace.size(); ++p) {
    for (const PlanAction& action : plan.actions[p]) {
      const bool too_late = action.kind == PlanAction::kUnshard && action.unit == trace[p].unit;
      EXPECT_FALSE(too_late) << "at " << p;
    }
  }
}

TEST(GatherPlan, PersistentUnitsAreGatheredOnce) {
  const std::vector<int> units = forward_backward(6);
  const Trace trace = one_by_one(units);
  PlanBudget budget = budget_of(6, 1, 20);
  budget.persistent[2] = budget.persistent[4] = true;
  const std::map<int, int> gathers = simulate(trace, {}, budget, make_plan(trace, {}, budget));
  EXPECT_EQ(gathers.at(2), 1);
  EXPECT_EQ(gathers.at(4), 1);
  EXPECT_EQ(gathers.at(0), 2);
  EXPECT_EQ(make_plan(trace, {2, 4}, budget).num_gathers, make_plan(trace, {}, budget).num_gathers - 2);
}

TEST(GatherPlan, NothingIsGatheredThatIsThere) {
  const Trace trace = one_by_one({0, 1, 0, 1});
  EXPECT_EQ(make_plan(trace, {0, 1}, budget_of(2, 2, 100)).num_gathers, 0);
  EXPECT_EQ(make_plan({}, {0}, budget_of(1, 1, 100)).num_gathers, 0);
}

TEST(GatherPlan, ComesBackWithinTheBudgetAfterAGreedyOperator) {
  const Trace trace = trace_of({{0, 1, 2, 3}, {3}});
  const PlanBudget budget = budget_of(4, 2, 0);
  const GatherPlan plan = make_plan(trace, {}, budget);
  simulate(trace, {}, budget, plan);
  EXPECT_EQ(plan.num_gathers, 4);
  const GatherPlan of_too_many = make_plan(one_by_one({0, 1}), {0, 1, 2, 3}, budget);
  EXPECT_EQ(of_too_many.actions[0],
            (std::vector<PlanAction>{{PlanAction::kReshard, 2}, {PlanAction::kReshard, 3}}));
}

TEST(GatherPlan, IsTheSameEveryTime) {
  std::mt19937 random(5);
  const Trace trace = one_by_one(random_units(random, 9, 200));
  const PlanBudget budget = budget_of(9, 3, 20);
  EXPECT_EQ(make_plan(trace, {1, 2}, budget).actions, make_plan(trace, {1, 2}, budget).actions);
}

}  // namespace
}  // namespace tessera::zero
