#include "zero/reduce/reduction_queue.h"

#include <algorithm>
#include <thread>

#include "core/str.h"

namespace tessera::zero {

constexpr int kFirstPassesWithoutWaits = 8;

ReductionQueue::ReductionQueue(std::vector<ParamUnit>& units, std::vector<int> order, const Options& options)
    : units_(units), options_(options), next_passes_without_waits_(kFirstPassesWithoutWaits) {
  set_order(std::move(order));
}

void ReductionQueue::set_order(std::vector<int> order) {
  order_ = std::move(order);
  for (int place = 0; place < size(); ++place) units_[order_[place]].gradient.place = place;
}

void ReductionQueue::begin() {
  num_issued_ = num_completed_ = 0;
  if (passes_without_waits_ > 0) --passes_without_waits_;
}

int ReductionQueue::num_ready() const {
  int ready = num_issued_;
  while (ready < size() && units_[order_[ready]].gradient.num_missing == 0) ++ready;
  return ready;
}

ReductionQueue::Wait ReductionQueue::in_hook() const {
  if (options_.hooks_may_block) return Wait::kUntilDone;
  return waits_in_hooks() ? Wait::kLimited : Wait::kNo;
}

ParamUnit* ReductionQueue::complete_next(Wait wait) {
  ParamUnit& unit = units_[order_[num_completed_]];
  comm::WorkPtr& reduction = unit.gradient.reduction;
  if (wait == Wait::kNo && !reduction->test()) return nullptr;
  if (wait == Wait::kLimited && !arrives_within_limit(unit)) return nullptr;
  reduction->wait();
  reduction.reset();
  ++num_completed_;
  return &unit;
}

bool ReductionQueue::arrives_within_limit(const ParamUnit& unit) {
  using std::chrono::microseconds;
  const auto deadline = std::chrono::steady_clock::now() + options_.wait_limit;
  for (microseconds pause(10); !unit.gradient.reduction->test();
       pause = std::min(pause * 2, microseconds(500))) {
    if (std::chrono::steady_clock::now() > deadline) {
      const bool first_time = next_passes_without_waits_ == kFirstPassesWithoutWaits;
      passes_without_waits_ = next_passes_without_waits_;
      next_passes_without_waits_ = std::min(next_passes_without_waits_ * 2, 1 << 20);
      if (first_time)
        options_.log.warning(
            str("rank ", options_.rank, " waited ", options_.wait_limit.count() / 1000.0,
                " s during backward for the gradients of ", unit.name,
                ": the ranks seem to use different parameters. Results don't change, but gradients "
                "then wait in p.grad, in memory that stage 3 does not bound"));
      return false;
    }
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace tessera::zero
