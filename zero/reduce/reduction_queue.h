// ReductionQueue: the reductions of one backward, issued and completed in one agreed order.
//
// [Note: one order of reductions]
// Reductions are collectives, but gradients finish in an order that may differ between ranks (unused
// parameters, branches). So units are reduced in one agreed order: at first the reverse of registration, then
// the order in which rank 0's first backward completed them. A unit is issued when it and all units before it
// are complete; whatever is left is issued at the end of backward, with zeros for gradients that never came.
//
// [Note: hooks wait with a limit]
// Where parameters are sharded, a hook that waits for a reduction could wait for ever: the other rank may
// lack a gradient, which only the end of its backward declares missing, and before that wait in a gather
// that this rank has not issued yet. That takes ranks which use different parameters. So such a wait has
// a limit. Once it is reached, hooks don't wait for the next 8 passes (then 16, 32 …), gradients stay in
// `p.grad`, and a warning says so: the results are the same, the memory of gradients is not bounded in those
// passes. The agreed order of a device (residency.h: [Note: one order on a device]) needs no limit, because
// each rank issues reductions at recorded places, with zeros for what it lacks, and reduces what comes later
// on its own. That second sum has another order of addition: ranks that use different parameters would then
// get other bits at stage 3 than at stages 0 to 2. Where waits block, one sum in rank order is kept, and with
// it the limit. A wait that only orders streams (CUDA) holds up no thread, and needs none of this.
#pragma once

#include <chrono>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// Used by one thread at a time: autograd's in hooks, and the one that calls backward(). The units must
/// outlive it.
class ReductionQueue {
 public:
  enum class Wait {
    kNo,       ///< takes only what has arrived
    kLimited,  ///< see [Note: hooks wait with a limit]
    kUntilDone,
  };
  struct Options {
    int rank = 0;                 ///< for the warning
    bool hooks_may_block = true;  ///< false: a rank that waits in a hook may keep others from getting there
    std::chrono::milliseconds wait_limit = std::chrono::seconds(1);
    Logger log;
  };

  /// `order`: indices of the units to reduce.
  ReductionQueue(std::vector<ParamUnit>& units, std::vector<int> order, const Options& options);

  /// A backward begins: nothing has been issued.
  void begin();
  /// Another order, of the same units. Nothing may be in flight.
  void set_order(std::vector<int> order);
  const std::vector<int>& order() const { return order_; }
  int size() const { return static_cast<int>(order_.size()); }

  bool all_issued() const { return num_issued_ == size(); }
  int num_issued() const { return num_issued_; }
  int num_completed() const { return num_completed_; }
  int in_flight() const { return num_issued_ - num_completed_; }
  ParamUnit& next() { return units_[order_[num_issued_]]; }
  /// Of the units in order: those issued, and those after them that lack no gradient.
  int num_ready() const;
  /// Next() has been issued: its gradient.reduction is in flight.
  void issued() { ++num_issued_; }

  /// How a hook waits, now.
  Wait in_hook() const;
  /// Waits for the oldest reduction in flight, and returns its unit; null when that takes a wait which
  /// `wait` does not allow. Throws CommError.
  ParamUnit* complete_next(Wait wait);
  /// False for some passes once a wait has reached the limit.
  bool waits_in_hooks() const { return passes_without_waits_ == 0; }

 private:
  bool arrives_within_limit(const ParamUnit& unit);

  std::vector<ParamUnit>& units_;
  std::vector<int> order_;
  Options options_;
  int num_issued_ = 0;
  int num_completed_ = 0;
  int passes_without_waits_ = 0;  // this backward and those after it
  int next_passes_without_waits_;
};

}  // namespace tessera::zero
