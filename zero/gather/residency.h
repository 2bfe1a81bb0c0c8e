// Residency decides when units are unsharded, gathers and releases them, and keeps what autocast has made of
// them.
//
// Sharded units are cached: see [Note: residency is a cache] in gather_plan.h. Units of which this rank
// updates a shard but keeps all values (stages 1 and 2) keep their buffers; there a unit is waited for until
// the all-gather of the updated shards has arrived. Operators report what they are about to read through
// on_use(). A unit can be read only once its gather is done ([Note: guarded until it has arrived] in
// unit_memory.h). The order of the gathers is CollectiveOrder's.
//
// [Note: one thread at a time]
// Any thread may run the model, and another one the next step: operators are heard on all threads. But what
// an operator reads is pinned until it ends, and there is one order of use. So only one thread may be inside
// an operator over the units at a time (autograd's threads take turns with the one that called backward).
// Where units are resharded (stage 3), an operator of a second thread is an error, unless it reads what the
// first one's has pinned, as the helper threads of a parallel kernel do. Where units stay unsharded (stages 1
// and 2, shared memory), further threads may read beside the first, but not during an update.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "zero/gather/cast_tracker.h"
#include "zero/gather/kept_failure.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/stream_order.h"
#include "zero/plan/collective_order.h"
#include "zero/plan/layout.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

struct ResidencyOptions {
  bool overlap = true;  ///< false: wait for each gather where it is issued, prefetch nothing
  int capacity_units = 3;
  int64_t max_live_numel = 1'000'000'000;
  int64_t prefetch_numel = 50'000'000;
  int64_t persistence_numel = 100'000;  ///< units up to this size stay unsharded between updates
  bool track_casts = false;             ///< the model runs under autocast
  Mesh mesh = {};                       ///< who gathers together
  /// Joins the ranks that have a second copy of the parameters among them; null: there is none.
  comm::CommunicatorPtr secondary = nullptr;
  /// These do what has to come before a gather: the update of the unit's shard that step() has left for
  /// later, if it has ([Note: deferred updates] in sharded_optimizer.h; unset: there are none); and `count`
  /// reductions of the backward under way, where both have one order. Both are collective.
  std::function<void(ParamUnit&)> deferred_update;
  std::function<void(int count)> issue_reductions;
  Logger log;
};

/// Returns the bounds of `options` with the size of each unit, for CollectiveOrder.
PlanBudget budget_of(const std::vector<ParamUnit>& units, const ResidencyOptions& options);

/// Counters of one pass, for tests and metrics.
struct ResidencyCounts {
  std::vector<int> gathers;  ///< by unit
  int agreed_gathers = 0;    ///< of these, gathers the ranks had to agree on one by one
};

/// Decides when one rank's units are unsharded, and issues their gathers. Owns the buffers of gathered units
/// and the record of their casts. Calls from several threads are serialised; see [Note: one thread at a
/// time]. Requires: layout, units and order outlive it.
class Residency {
 public:
  /// `comm`: of the ranks that gather together, for that, and for agreements on the next gather. `calls`: of
  /// all ranks, for agreements between those that make the same call, but may have issued different numbers
  /// of gathers: in `comm`'s list of collectives these would stand at different places. Collective over
  /// `calls` where the mesh has several replicas.
  Residency(const Layout& layout, std::vector<ParamUnit>& units, CollectiveOrder& order,
            comm::CommunicatorPtr comm, comm::CommunicatorPtr calls, const ResidencyOptions& options);
  ~Residency();

  // -- for operators (OperatorListener) --
  /// Collective when the unit is not unsharded. Never throws: a failure is kept for rethrow(), and the unit
  /// refuses access, so that the operator throws: [Note: a failure is thrown by the operator that reads] in
  /// unit_memory.h.
  void on_use(int unit, const char* operator_name) noexcept;
  /// The outermost operator has ended: what it used may go.
  void operator_ended() noexcept;
  /// An operator is about to write into a unit. Refused in the same way outside of GatheredParameters.
  void on_write(int unit, const at::Tensor& written, const char* operator_name) noexcept;
  /// An operator is about to read a cast of a unit (a tracked one), after on_use().
  void on_cast_read(int unit, c10::StorageImpl& cast, const char* operator_name) noexcept;

  // -- for ShardedModel --
  /// Collective where units are sharded (prefetch). Starts recording or replaying the order of use.
  void begin_pass(Pass pass);
  /// Collective. Leaves a pass that will not be finished: evaluation begins.
  void drop_pass();
  /// Collective. The pass will use nothing more: issues what is left of the plan. To be called before any
  /// other wait for the other ranks, which may be inside an operator that needs those gathers.
  void finish_gathers();
  /// Collective. Issues what is left of the plan; adopts the order after a recorded pass.
  void end_pass();
  /// Throws Error, which names `call`, where a GatheredParameters holds what the call would change: what
  /// parameters_updated() is told of.
  void refuse_held(std::string_view call, bool frozen_too = false) const;
  /// The shards are about to get new values, until parameters_updated(): waits for gathers in flight,
  /// refuses readers.
  void begin_update();
  /// Collective. The shards of trainable units (`frozen_too`: and of frozen ones) have new values, or will
  /// have them before they are gathered: what is unsharded of them is stale.
  void parameters_updated(bool frozen_too = false);
  /// Collective, with deferred updates. Issues the gathers that parameters_updated() has left for the units'
  /// first use, in one order on all ranks.
  void flush_deferred_gathers();
  /// All units, in the order a pass of training first uses them.
  std::vector<int> order_of_first_use() const;
  /// Throws the first failure met inside an operator.
  void rethrow();
  /// Keeps a failure met where nothing may be thrown; `thrown` is true for one that is thrown as well.
  void keep_failure(const std::exception_ptr& failure, bool thrown = false);
  bool has_failure() const;
  /// Tells hooks of backward whether reductions are issued by the recorded order of use now.
  bool reductions_have_places();
  /// Collective. After a failure that all ranks have met alike: ends the pass, and makes readable what the
  /// failure has made unreadable. Where that takes new values, those are gathered. Throws a failure that
  /// nobody has been told of yet.
  void forget_failure();

  // -- for GatheredParameters and whole-model access --
  /// Collective. Unshards units and pins them until unpin(); all ranks with the same units. Throws CommError.
  void pin(const std::vector<int>& units, bool writable);
  /// Ends what pin() began. If the gathers of a pass go on, align() comes first.
  void unpin(const std::vector<int>& units, bool writable);
  /// Collective. Brings all ranks to the same place of the plan, so that what changes it changes it alike.
  void align(const char* why);
  /// Waits for gathers in flight.
  void wait_all();

  // -- counters, for tests and metrics --
  const ResidencyCounts& counts() const { return counts_; }                    ///< of the pass in progress
  const ResidencyCounts& previous_counts() const { return previous_counts_; }  ///< of the one before
  int num_unsharded() const;
  int max_unsharded() const { return max_unsharded_; }  ///< highest num_unsharded() since the last update
  const BufferPool& pool() const { return pool_; }
  const CastTracker& casts() const { return casts_; }

  /// An operator has made `copy` of a part of a unit: see CastTracker::add().
  void track_cast(const CastSource& source, const at::Tensor& copy);
  /// Whether some unit is sharded, so that gathers are issued during a pass and not after the update alone.
  bool gathers_on_use() const { return gathers_on_use_; }
  /// Whether on_use() is to be called: not where every rank updates all values itself (stage 0).
  bool hears_reads() const { return hears_reads_; }
  bool tracks_casts() const { return gathers_on_use_ && options_.track_casts; }

 private:
  using Lock = std::unique_lock<std::recursive_mutex>;
  Lock enter(const char* what);
  bool another_thread_inside() const { return !used_.empty() && inside_ != std::this_thread::get_id(); }
  // how operators find a unit readable
  void on_use_beside(ParamUnit& unit, const char* operator_name);
  void ensure_unsharded(ParamUnit& unit);
  void make_readable(ParamUnit& unit);
  void refuse(ParamUnit& unit, const std::exception_ptr& failure) noexcept;

  // the order
  void replay(const ParamUnit& unit);
  void leave_plan(const ParamUnit& unit);
  void advance_to(size_t place);
  void finish_plan();
  void run(const std::vector<PlanAction>& actions);
  void read_ahead(const GatherPlan& plan);
  void issue_reductions(int count);
  int num_reductions_issued() const;
  void agree_on(const ParamUnit& unit);
  /// Collective. An exchange on `comm_` whose error says what to do where ranks need different units.
  template <class T>
  std::vector<T> agree(const T& mine, const std::string& label);
  /// Collective, over `calls_`. What the ranks give that gather together with this one.
  template <class T>
  std::vector<T> exchange_in_shard_group(const T& mine, const char* label);

  // gathers: unshard() is collective. What it and wait() throw, CommError or the allocator's error, is kept:
  // the other ranks count on this gather, and the unit is not readable
  void unshard(ParamUnit& unit);
  void wait(ParamUnit& unit);
  void take_buffer(ParamUnit& unit);
  std::exception_ptr take_buffers(const std::vector<int>& units);
  void give_buffers_back(const std::vector<int>& units);
  void make_room(const ParamUnit& unit);
  void reshard(ParamUnit& unit);
  void reshard_unpinned();
  void drop(ParamUnit& unit);
  template <class Function>
  auto or_kept(const Function& function);
  void uses(const ParamUnit& unit) const { streams_.uses(unit.memory.buffer()); }
  bool is_deferred(const ParamUnit& unit) const;
  void flush_to(const ParamUnit& unit);
  std::set<int> kept_units() const;
  std::vector<ParamUnit*> updated_units(bool frozen_too) const;

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  CollectiveOrder& order_;
  comm::CommunicatorPtr comm_, calls_;
  ResidencyOptions options_;
  bool gathers_on_use_;
  bool hears_reads_;
  bool some_rank_gathers_on_use_;  // replicas may differ: a host's memory is shared, or not

  // Guards what follows, the order, memory and use of units; held while a gather is waited for.
  mutable std::recursive_mutex mutex_;
  BufferPool pool_;
  CastTracker casts_;
  StreamOrder streams_;
  std::thread::id inside_;  // the thread whose operator has used them
  std::vector<int> used_;   // by the operator that runs
  int64_t operator_count_ = 0;
  std::deque<int> deferred_gathers_;  // units that stay unsharded, whose gathers are still to be issued
  std::vector<int> resharded_when_unpinned_;
  bool updating_ = false;  // between begin_update() and parameters_updated()
  KeptFailure failure_;
  bool operator_refused_ = false;  // an operator that runs cannot read what it wants
  int max_unsharded_ = 0;
  ResidencyCounts counts_, previous_counts_;
};

}  // namespace tessera::zero
