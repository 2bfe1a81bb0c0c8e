// The part of GradientReducer that sums over the rows of ranks: [Note: hybrid sharding] in mesh.h.
#include "zero/reduce/gradient_reducer.h"

namespace tessera::zero {

/// Issues the sums over the replicas of those units whose reduction in the row is complete, and the gathers
/// of those sums that are there, each in the agreed order. Where reductions are buffered, few are under way
/// at once; only `at_end` is anything waited for. The replicas' accumulators get the same bits, also where
/// the backend's all-reduce would not promise that: each rank sums its piece, and the others take it over.
void GradientReducer::issue_sums(bool at_end) {
  if (!options_.replicas || !boundary_) return;
  const auto may_wait_for = [&](const comm::WorkPtr& work) {
    if (!at_end && !work->test()) return false;
    work->wait();
    return true;
  };
  while (static_cast<int>(sums_.size()) < queue_->num_completed()) {
    const auto limit = static_cast<size_t>(options_.num_slots);
    if (sums_.size() >= limit && !may_wait_for(sums_[sums_.size() - limit])) break;
    const ParamUnit& unit = units_[order()[sums_.size()]];
    sums_.push_back(
        options_.replicas->reduce_scatter(unit.gradient.accumulator, {piece(unit), postscale_}, unit.name));
  }
  if (!at_end && sum_gather_comm_ == options_.replicas) return;  // sums first, on every rank
  while (sum_gathers_.size() < sums_.size() && may_wait_for(sums_[sum_gathers_.size()])) {
    const ParamUnit& unit = units_[order()[sum_gathers_.size()]];
    sum_gathers_.push_back(sum_gather_comm_->all_gather(unit.gradient.accumulator, piece(unit), unit.name));
  }
}

/// Collective, at an accumulation boundary.
void GradientReducer::sum_over_replicas() {
  issue_sums(/*at_end=*/true);
  for (const comm::WorkPtr& gather : sum_gathers_) gather->wait();
}

}  // namespace tessera::zero
