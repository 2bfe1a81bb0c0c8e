// OrderOfUse: in which order a pass uses units. The first pass records it; from then on it is known, and with
// it a plan of what to gather and to release ([Note: residency is a cache] in gather_plan.h). Training and
// evaluation have an order each.
//
// A pass that needs a unit which the order does not have leaves the order: the rest of the pass has none, and
// the next pass of its kind records anew.
#pragma once

#include <map>
#include <optional>
#include <set>

#include "zero/plan/gather_plan.h"

namespace tessera::zero {

enum class Pass { kTrain, kEvaluation };

/// Not thread-safe. Plain bookkeeping: issues nothing.
class OrderOfUse {
 public:
  explicit OrderOfUse(PlanBudget budget) : budget_(std::move(budget)) {}

  // A pass begins, ends as it should, or is left in the middle.
  void begin(Pass pass);
  /// `trace`: what rank 0 has recorded; the order of such passes from now on, unless it is empty.
  void end(Trace trace);
  void drop() { in_pass_ = false; }
  bool in_pass() const { return in_pass_; }

  bool recording() const { return in_pass_ && mode_ == Mode::kRecord; }
  void record(int unit, int64_t operator_number, int num_reductions);
  const Trace& recorded() const { return recorded_; }

  bool replaying() const { return in_pass_ && mode_ == Mode::kReplay; }
  /// While replaying. `unsharded`: the units that are unsharded when the pass begins.
  void make_plan(std::set<int> unsharded);
  /// The place in the order that the pass has come to.
  size_t place() const { return place_; }
  size_t last_place() const { return trace().size() - 1; }
  const Use& at(size_t place) const { return trace()[place]; }
  /// Moves to the next place. Returns what to do there before its operator runs.
  const std::vector<PlanAction>& advance() { return plan_->actions[++place_]; }
  const GatherPlan& plan() const { return *plan_; }
  /// The rest of the pass has no order.
  void leave();

  const PlanBudget& budget() const { return budget_; }
  /// The recorded order of a kind of pass, or null.
  const Trace* recorded_order(Pass pass) const;

 private:
  enum class Mode { kRecord, kReplay, kOnDemand };
  struct Recording {
    std::optional<Trace> trace;
    std::map<std::set<int>, GatherPlan> plans;  // by what is unsharded at the start
  };
  Recording& recording_of_pass() { return recordings_[static_cast<int>(pass_)]; }
  const Trace& trace() const { return *recordings_[static_cast<int>(pass_)].trace; }

  PlanBudget budget_;
  Recording recordings_[2];
  Pass pass_ = Pass::kTrain;
  bool in_pass_ = false;
  Mode mode_ = Mode::kRecord;
  Trace recorded_;
  const GatherPlan* plan_ = nullptr;
  size_t place_ = 0;
};

}  // namespace tessera::zero
