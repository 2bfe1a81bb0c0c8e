// CollectiveOrder: the order in which a rank issues the collectives of a pass: the gathers of units that are
// about to be read, and the reductions of units whose gradients are complete.
//
// [Note: one order for all ranks]
// A gather is a collective. While the order of use is unknown, each gather is agreed on by name first
// (exchange over the store), so ranks that differ get a CommError with rank and unit instead of a hang.
// Once a trace is adopted (rank 0's), every rank issues exactly the plan's gathers, in the plan's order. A
// rank that skips units issues their gathers when it uses a later one, or at the end of the pass. A rank
// that needs a unit which the plan does not have issues the rest of the plan first, then agrees with the
// others as in the first pass; the next pass records anew.
//
// Reductions are collectives too: reduction_order.h.
//
// [Note: one order on a device]
// On CUDA a wait only orders streams, and NCCL's collectives are kernels that wait for each other on the
// device. If ranks start the kernels of two communicators in different orders, they can wait for each other
// for ever. The same happens when the start of one kernel waits, by streams, for the other. So where waits
// don't block (Communicator::wait_blocks), gathers and gradient reductions use one group and one order. (With
// several replicas, zero/plan/mesh.h, there are two groups; NCCL then starts their kernels in the order in
// which the host has issued them, which is that one: NCCL_LAUNCH_ORDER_IMPLICIT, NCCL 2.26 and later.) Each
// place of the recorded order of use says how many reductions rank 0 had ready there. A rank that reaches the
// place issues that many, with zeros for gradients that it lacks; a gradient that comes later is reduced
// after backward (GradientReducer::reduce_late). While there is no recorded order, hooks issue reductions,
// and before an agreed gather all ranks issue as many as the rank that has issued the most. Over CPU backends
// no wait of one group delays another: there the reductions have their own group, and are issued when they
// are ready.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "zero/plan/gather_plan.h"
#include "zero/plan/reduction_order.h"

namespace tessera::zero {

enum class Pass { kTrain, kEvaluation };

/// Keeps the order of one rank's collectives: what a pass uses, the plan of gathers that follows from it, and
/// the reductions of a backward. Issues nothing: Residency issues the gathers, GradientReducer the
/// reductions. Training and evaluation have an order of use each. The first pass of a kind records it; from
/// then on it is known. A pass that needs a unit which the order does not have leaves the order: the rest of
/// the pass has none, and the next pass of its kind records anew. Not thread-safe: Residency's lock guards
/// the order of use.
class CollectiveOrder {
 public:
  /// `to_reduce`: of `reductions`. `one_order`: these are issued at places of the recorded order of use; see
  /// [Note: one order on a device].
  CollectiveOrder(PlanBudget budget, std::vector<int> to_reduce, bool one_order);

  // -- a pass: it begins, ends as it should, or is left in the middle --
  void begin(Pass pass);
  /// `trace`: what rank 0 has recorded; the order of such passes from now on, unless it is empty.
  void end(Trace trace);
  void drop() { in_pass_ = false; }
  bool in_pass() const { return in_pass_; }

  bool recording() const { return in_pass_ && mode_ == Mode::kRecord; }
  void record(int unit, int64_t operator_number);
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
  void leave() { mode_ = Mode::kOnDemand; }

  const PlanBudget& budget() const { return budget_; }
  /// The recorded order of a kind of pass, or null.
  const Trace* recorded_order(Pass pass) const;

  /// The reductions of a backward.
  ReductionOrder reductions;

  // -- both in one order --
  bool one_order() const { return one_order_; }
  /// Whether reductions are issued at the places of the order of use, and not by hooks.
  bool reductions_have_places() const { return one_order_ && replaying(); }

 private:
  enum class Mode { kRecord, kReplay, kOnDemand };
  struct Recording {
    std::optional<Trace> trace;
    std::map<std::set<int>, GatherPlan> plans;  // by what is unsharded at the start
  };
  Recording& recording_of_pass() { return recordings_[static_cast<int>(pass_)]; }
  const Trace& trace() const { return *recordings_[static_cast<int>(pass_)].trace; }

  PlanBudget budget_;
  const bool one_order_;
  Recording recordings_[2];
  Pass pass_ = Pass::kTrain;
  bool in_pass_ = false;
  Mode mode_ = Mode::kRecord;
  Trace recorded_;
  const GatherPlan* plan_ = nullptr;
  size_t place_ = 0;
};

}  // namespace tessera::zero
