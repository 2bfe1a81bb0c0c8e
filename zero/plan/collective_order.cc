#include "zero/plan/collective_order.h"

#include <algorithm>
#include <utility>

namespace tessera::zero {

CollectiveOrder::CollectiveOrder(PlanBudget budget, std::vector<int> reductions, bool one_order)
    : budget_(std::move(budget)), one_order_(one_order) {
  set_reductions(std::move(reductions));
}

// ---------------------------------------------------------------------------------- the order of use

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
    recorded_.push_back({unit, operator_number, operator_number, one_order_ ? num_ready() : 0});
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

// ----------------------------------------------------------------------------- the order of reductions

void CollectiveOrder::set_reductions(std::vector<int> order) {
  reductions_ = std::move(order);
  for (int place = 0; place < num_reductions(); ++place) places_[reductions_[place]] = place;
  complete_.assign(reductions_.size(), false);
}

void CollectiveOrder::begin_backward() {
  in_backward_ = true;
  num_issued_ = num_completed_ = 0;
  complete_.assign(reductions_.size(), false);
}

void CollectiveOrder::drop_backward() {
  in_backward_ = false;
  finished_first_.clear();
}

void CollectiveOrder::gradient_complete(int unit) {
  complete_[place_of(unit)] = true;
  if (!agreed_) finished_first_.push_back(unit);
}

int CollectiveOrder::num_ready() const {
  if (!in_backward_) return 0;
  if (!agreed_) return static_cast<int>(finished_first_.size());
  int ready = num_issued_;
  while (ready < num_reductions() && complete_[ready]) ++ready;
  return ready;
}

std::vector<int> CollectiveOrder::completion_order() const {
  std::vector<int> order = finished_first_;
  for (const int unit : reductions_)
    if (std::find(order.begin(), order.end(), unit) == order.end()) order.push_back(unit);
  return order;
}

void CollectiveOrder::agree(std::vector<int> order) {
  set_reductions(std::move(order));
  finished_first_.clear();
  agreed_ = true;
}

}  // namespace tessera::zero
