// GatherPlan: when to gather and when to drop units, for an order of use that is known. Pure arithmetic.
//
// [Note: residency is a cache]
// The first pass (forward + backward) records the order in which operators use units. From then on the
// future is known, so units are fetched ahead within a budget, and the unit dropped is the one used farthest
// in the future (Belady 1966). A prefetch drops the very unit that would have to go if one waited, and waits
// if that one is used in between: so fetching ahead never costs a gather. Every rank makes the same plan from
// the same trace, so the gathers, which are collectives, have the same order on every rank.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace tessera::zero {

/// A stretch of the pass in which one unit is used. Operators are numbered by their outermost call: a unit
/// stays pinned until the outermost operator that touched it has ended.
struct Use {
  int unit = 0;
  int64_t first_operator = 0;
  int64_t last_operator = 0;
  /// Says how many were ready by then; see [Note: one order on a device] in collective_order.h.
  int reductions = 0;
  bool operator==(const Use&) const = default;
};
using Trace = std::vector<Use>;

struct PlanBudget {
  int capacity_units = 3;                  ///< units unsharded at once, persistent ones not counted
  int64_t capacity_numel = 1'000'000'000;  ///< stage3_max_live_parameters
  int64_t prefetch_numel = 50'000'000;     ///< stage3_prefetch_bucket_size; 0: no prefetch
  std::vector<int64_t> unit_numel;         ///< by unit
  std::vector<bool> persistent;            ///< by unit: stays unsharded once gathered
};

struct PlanAction {
  enum Kind { kUnshard, kReshard } kind;
  int unit;
  bool operator==(const PlanAction&) const = default;
};

/// actions[p]: what to do on arriving at trace[p], in order, before its operator runs.
struct GatherPlan {
  std::vector<std::vector<PlanAction>> actions;
  int num_gathers = 0;
};

/// `unsharded`: the units already there when the pass starts. The budget is exceeded only where one
/// operator needs more units than it allows.
GatherPlan make_plan(const Trace& trace, std::set<int> unsharded, const PlanBudget& budget);

}  // namespace tessera::zero
