#include "zero/plan/reduction_order.h"

#include <algorithm>

namespace tessera::zero {

void ReductionOrder::set(std::vector<int> order) {
  units_ = std::move(order);
  for (int place = 0; place < static_cast<int>(units_.size()); ++place) places_[units_[place]] = place;
  complete_.assign(units_.size(), false);
}

void ReductionOrder::begin_backward() {
  in_backward_ = true;
  num_issued_ = num_completed_ = 0;
  complete_.assign(units_.size(), false);
}

void ReductionOrder::drop_backward() {
  in_backward_ = false;
  finished_first_.clear();
}

void ReductionOrder::gradient_complete(int unit) {
  complete_[place_of(unit)] = true;
  if (!agreed_) finished_first_.push_back(unit);
}

int ReductionOrder::num_ready() const {
  if (!in_backward_) return 0;
  if (!agreed_) return static_cast<int>(finished_first_.size());
  int ready = num_issued_;
  while (ready < static_cast<int>(units_.size()) && complete_[ready]) ++ready;
  return ready;
}

std::vector<int> ReductionOrder::completion_order() const {
  std::vector<int> order = finished_first_;
  for (const int unit : units_)
    if (std::find(order.begin(), order.end(), unit) == order.end()) order.push_back(unit);
  return order;
}

void ReductionOrder::agree(std::vector<int> order) {
  set(std::move(order));
  finished_first_.clear();
  agreed_ = true;
}

}  // namespace tessera::zero
