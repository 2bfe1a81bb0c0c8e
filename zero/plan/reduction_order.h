// ReductionOrder: the order in which a backward reduces the units' gradients.
//
// Reductions are collectives, but gradients finish in an order that may differ between ranks (unused
// parameters, branches). So units are reduced in one agreed order: at first the reverse of registration, then
// the order in which rank 0's first backward completed them. A unit is issued when it and all units before it
// are complete; whatever is left is issued at the end of backward, with zeros for gradients that never came.
#pragma once

#include <map>
#include <utility>
#include <vector>

namespace tessera::zero {

/// Keeps the order of one rank's reductions, and how far a backward has come. Not thread-safe: belongs to the
/// thread that runs backward.
class ReductionOrder {
 public:
  /// `units`: those to reduce, in the order that holds until the first backward has shown a better one.
  explicit ReductionOrder(std::vector<int> units) { set(std::move(units)); }

  /// Nothing has been issued, and no gradient is complete.
  void begin_backward();
  void end_backward() { in_backward_ = false; }
  /// The same for a backward that will not be finished: its order of completion is not one to record.
  void drop_backward();
  bool in_backward() const { return in_backward_; }

  /// Units, in the agreed order.
  const std::vector<int>& units() const { return units_; }
  int place_of(int unit) const { return places_.at(unit); }

  /// No gradient of the unit is missing now.
  void gradient_complete(int unit);
  /// Counts the reductions of the backward under way that could be issued, in the agreed order (in the first
  /// backward: the units complete so far). Returns 0 outside of backward.
  int num_ready() const;

  /// The unit whose turn it is. Requires: not all_issued().
  int next() const { return units_[num_issued_]; }
  bool next_is_complete() const { return complete_[num_issued_]; }
  void issued() { ++num_issued_; }
  bool all_issued() const { return num_issued_ == static_cast<int>(units_.size()); }
  /// Returns the number since the last begin_backward().
  int num_issued() const { return num_issued_; }
  int num_completed() const { return num_completed_; }
  int in_flight() const { return num_issued_ - num_completed_; }
  /// The unit whose reduction was issued first of those in flight. Requires: in_flight() > 0.
  int oldest() const { return units_[num_completed_]; }
  void completed() { ++num_completed_; }

  /// Whether the order of reductions is the one that a first backward has shown.
  bool agreed() const { return agreed_; }
  /// The order in which the units were completed; those that were not come last.
  std::vector<int> completion_order() const;
  /// Rank 0's completion_order() becomes the agreed order. Requires: nothing is in flight.
  void agree(std::vector<int> order);

 private:
  void set(std::vector<int> order);

  std::vector<int> units_;           // by place
  std::map<int, int> places_;        // by unit
  std::vector<bool> complete_;       // by place
  std::vector<int> finished_first_;  // units, as the first backward completes them
  bool agreed_ = false;
  bool in_backward_ = false;
  int num_issued_ = 0, num_completed_ = 0;
};

}  // namespace tessera::zero
