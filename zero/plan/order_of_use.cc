#include "zero/plan/order_of_use.h"

namespace tessera::zero {

void OrderOfUse::begin(Pass pass) {
  pass_ = pass;
  in_pass_ = true;
  place_ = 0;
  recorded_.clear();
  plan_ = nullptr;
  mode_ = recording_of_pass().trace ? Mode::kReplay : Mode::kRecord;
}

void OrderOfUse::end(Trace trace) {
  if (mode_ == Mode::kOnDemand) recording_of_pass() = {};
  if (!trace.empty()) recording_of_pass() = {std::move(trace), {}};
  in_pass_ = false;
}

void OrderOfUse::record(int unit, int64_t operator_number, int num_reductions) {
  if (!recorded_.empty() && recorded_.back().unit == unit) {
    recorded_.back().last_operator = operator_number;
  } else {
    recorded_.push_back({unit, operator_number, operator_number, num_reductions});
  }
}

void OrderOfUse::make_plan(std::set<int> unsharded) {
  auto& plans = recording_of_pass().plans;
  auto found = plans.find(unsharded);
  if (found == plans.end())
    found = plans.emplace(unsharded, zero::make_plan(trace(), unsharded, budget_)).first;
  plan_ = &found->second;
}

void OrderOfUse::leave() { mode_ = Mode::kOnDemand; }

const Trace* OrderOfUse::recorded_order(Pass pass) const {
  const std::optional<Trace>& trace = recordings_[static_cast<int>(pass)].trace;
  return trace ? &*trace : nullptr;
}

}  // namespace tessera::zero
