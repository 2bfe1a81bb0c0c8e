// UnitCache: the units that are unsharded, the buffers they live in, and the casts that autocast made of
// them. It does what Residency decides: unshards, waits, reshards. See [Note: residency is a cache] in
// gather_plan.h.
#pragma once

#include <exception>
#include <functional>
#include <set>
#include <vector>

#include "comm/communicator.h"
#include "zero/gather/cast_tracker.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/stream_order.h"
#include "zero/plan/gather_plan.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// Counters of one pass, for tests and metrics.
struct ResidencyCounts {
  std::vector<int> gathers;   ///< by unit
  int agreed_gathers = 0;     ///< of these, gathers the ranks had to agree on one by one
  int secondary_gathers = 0;  ///< of these, gathers of the second copy
};

/// Not thread-safe: Residency's lock guards it. The units must outlive it.
class UnitCache {
 public:
  struct Options {
    int max_free = 3;     ///< unused buffers kept
    bool overlap = true;  ///< false: each gather is waited for where it is issued
    /// Of the ranks that have a second copy of the parameters among them; null: there is none.
    comm::CommunicatorPtr secondary = nullptr;
    /// Called for each gather that fails, which leaves its unit unreadable, before that is thrown.
    std::function<void(const std::exception_ptr&)> keep_failure;
    /// Called before each gather: the unit's shard may still have to be updated ([Note: late updates] in
    /// sharded_optimizer.h).
    std::function<void(ParamUnit&)> update = [](ParamUnit&) {};
  };
  UnitCache(std::vector<ParamUnit>& units, comm::CommunicatorPtr comm, const Options& options);

  /// Collective. Issues the gather of the unit. What it throws, CommError or the allocator's error, is kept:
  /// the other ranks count on this gather.
  void unshard(ParamUnit& unit);
  /// A unit is about to be read on this thread's current stream: [Note: streams of the model] in
  /// stream_order.h.
  void follow_stream() { streams_.follow(); }
  /// What runs on this thread's current stream reads them.
  void uses(const ParamUnit& unit) const { streams_.uses(unit.memory.buffer()); }
  void uses(c10::StorageImpl& cast) const { streams_.uses(CastTracker::memory_of(cast)); }
  /// Buffers for the gathers of resharded units, before the ranks agree on them: for all units or,
  /// when the allocator's error is returned, for none.
  std::exception_ptr take_buffers(const std::vector<int>& units);
  void give_buffers_back(const std::vector<int>& units);
  /// Waits for the gather in flight, if there is one; the unit and its casts are readable then.
  /// Throws CommError.
  void wait(ParamUnit& unit);
  void wait_all();
  /// Gives the unit's buffer back, and drops its casts' memory.
  void reshard(ParamUnit& unit);
  /// The same, once the unit is unpinned and reshard_unpinned() is called.
  void reshard_when_unpinned(const ParamUnit& unit) { deferred_.push_back(unit.index); }
  void reshard_unpinned();
  /// A pass outside of training begins: what its plan gathers is read ahead, where it is on disk.
  void expect(const GatherPlan& plan);
  /// Collective. Carries out a part of the plan, one after another.
  void run(const std::vector<PlanAction>& actions);
  /// Reshards the units used longest ago, none of them pinned, until `unit` fits the budget.
  void make_room(const ParamUnit& unit, const PlanBudget& budget);
  /// The unit has new values: forgets its casts, and reshards it if it is unsharded.
  void drop(ParamUnit& unit);

  /// The unsharded units, without those that are to be resharded.
  std::set<int> kept_units() const;
  int num_unsharded() const;
  int max_unsharded() const { return max_unsharded_; }  ///< highest num_unsharded() since reset_max()
  void reset_max() { max_unsharded_ = 0; }
  ResidencyCounts counts;
  const BufferPool& pool() const { return pool_; }
  BufferPool& pool() { return pool_; }
  CastTracker& casts() { return casts_; }
  const CastTracker& casts() const { return casts_; }

 private:
  void take_buffer(ParamUnit& unit);
  template <class Function>
  auto or_kept(const Function& function);

  std::vector<ParamUnit>& units_;
  comm::CommunicatorPtr comm_;
  Options options_;
  BufferPool pool_;
  CastTracker casts_;
  StreamOrder streams_;
  std::vector<int> deferred_;  // to be resharded once unpinned
  int max_unsharded_ = 0;
};

}  // namespace tessera::zero
