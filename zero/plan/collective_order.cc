#include "zero/plan/collective_order.h"

#include <utility>

namespace tessera::zero {

CollectiveOrder::CollectiveOrder(PlanBudget budget, std::vector<int> to_reduce, bool one_order)
    : reductions(std::move(to_reduce)), budget_(std::move(budget)), one_order_(one_order) {}

void CollectiveOrder::begin(Pass pass) {
  pass_ = pass;
  in_pass_ = true;
  place_ = 0;
  recorded_.clear();
  plan_ = nullptr;
  mode_ = recording_of_pass().trace ? Mode::kReplay : Mode::kRecord;
}

void CollectiveOrder::end(Trace trace) {
  if (mode_ == Mode::kOnDemand) recording_of_pass() = {};
  if (!trace.empty()) recording_of_pass() = {std::move(trace), {}};
  in_pass_ = false;
}

void CollectiveOrder::record(int unit, int64_t operator_number) {
  if (!recorded_.empty() && recorded_.back().unit == unit) {
    recorded_.back().last_operator = operator_number;
  } else {
    recorded_.push_back({unit, operator_number, operator_number, one_order_ ? reductions.num_ready() : 0});
  }
}

void CollectiveOrder::make_plan(std::set<int> unsharded) {
  auto& plans = recording_of_pass().plans;
  auto found = plans.find(unsharded);
  if (found == plans.end())
    found = plans.emplace(unsharded, zero::make_plan(trace(), unsharded, budget_)).first;
  plan_ = &found->second;
}

const Trace* CollectiveOrder::recorded_order(Pass pass) const {
  const std::optional<Trace>& trace = recordings_[static_cast<int>(pass)].trace;
  return trace ? &*trace : nullptr;
}

}  // namespace tessera::zero
