// Residency: which units are resident (readable in full) at any moment, and the
// collectives that make them so.
//
// At stage 3 it is a cache over the shards (see [Note: residency is a cache] in gather_plan.h); at
// stages 1 and 2 the units keep their buffers, and what is cached is whether the all-gather of the
// updated shards has arrived. Operators report what they are about to read through touch(); nobody else
// decides when to gather. At every stage a unit can be read only once its gather is done ([Note: guarded
// until it has arrived] in unit_memory.h).
//
// [Note: one order for all ranks]
// A gather is a collective. While the order of use is unknown, each gather is agreed on by name first
// (exchange over the store), so ranks that differ get a CommError with rank and unit instead of a hang.
// Once a trace is adopted (rank 0's), every rank issues exactly the plan's gathers, in the plan's order: a
// rank that skips units issues their gathers when it moves on, or at the end of the pass; a rank that needs
// a unit the plan does not have first issues the rest of the plan, then asks the others as in the first
// pass, and the next pass records anew.
//
// [Note: one order on a device]
// On CUDA a wait only orders streams, and NCCL's collectives are kernels that wait for each other on
// the device. Kernels of two communicators that ranks start in different orders can wait for each other
// for ever; so can those of one whose start waits, by streams, for the other's. So where waits don't
// block (Communicator::wait_blocks), gathers and gradient reductions go through one group and in one
// order: with each place of the recorded order of use stands how many reductions rank 0 had ready
// there, and a rank that comes to it issues as many, with zeros for gradients that it lacks (what comes
// later still is reduced after backward: GradientReducer::reduce_late). While there is no recorded
// order, hooks issue reductions, and before an agreed gather all ranks issue as many as the one that is
// ahead. (Over CPU backends no wait of one group holds up another: there the reductions have a group of
// their own, and are issued when they are ready.)
//
// [Note: one thread at a time]
// Any thread may run the model, and another one the next step: operators are heard on all of them. But what
// an operator touches is pinned until it ends, and the order of use is one order; so only one thread may be
// inside an operator over the units at a time (autograd's threads take turns with the one that called
// backward). While units come and go (stage 3), an operator of a second thread is an error, unless it reads
// what the first one's holds anyway, as the helper threads of a parallel kernel do. Where units stay (stages
// 1 and 2, shared memory) further threads may read beside the first, but not during an update.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"
#include "zero/buffer_pool.h"
#include "zero/cast_tracker.h"
#include "zero/gather_plan.h"
#include "zero/layout.h"
#include "zero/unit_memory.h"

namespace tessera::zero {

struct ResidencyOptions {
  bool sharded = false;      ///< parameters are sharded (stage 3), and a gather moves them
  std::vector<bool> shared;  ///< by unit (empty: none): one memory for all ranks, see [Note: one copy on a
                             ///< host] in sharded_model.h
  bool overlap = true;       ///< false: wait for each gather where it is issued, prefetch nothing
  int capacity_units = 3;
  int64_t max_live_numel = 1'000'000'000;
  int64_t prefetch_numel = 50'000'000;
  int64_t persistence_numel = 100'000;  ///< units up to this size stay resident between updates
  bool track_casts = false;             ///< the model runs under autocast
  Logger log;
};

enum class Pass { kTrain, kEvaluation };

/// The gradient reductions of a pass, in their agreed order: see [Note: one order on
/// a device]. All Local but issue_until.
struct Reductions {
  std::function<bool()> under_way;  ///< a backward is
  std::function<int()> num_ready;
  std::function<int()> num_issued;
  std::function<void(int count)>
      issue_until;  ///< Collective. Issues until so many have been; outside of backward nothing
};

/// Counters of the pass in progress and the one before (for tests, metrics and the curious).
struct ResidencyCounts {
  std::vector<int> gathers;  ///< by unit
  int agreed_gathers = 0;    ///< of these, gathers the ranks had to agree on one by one
};

/// One rank's units. Calls from several threads are serialised; see [Note: one thread at a time]. `units[i]`
/// and `shards[i]` belong to Layout unit i; both must outlive it. `shards[i]` is slice rank of
/// units[i].contents() when parameters are not sharded.
class Residency {
 public:
  /// `comm`: for gathers, and agreements on the next one. `calls`: for agreements between ranks that make
  /// the same call, but may have issued different numbers of gathers: in `comm`'s list of collectives
  /// these would stand at different places.
  Residency(const Layout& layout, std::vector<UnitMemory>& units, std::vector<at::Tensor>& shards,
            comm::CommunicatorPtr comm, comm::CommunicatorPtr calls, const ResidencyOptions& options);
  ~Residency();

  // -- for operators (OperatorListener) --
  /// Collective when the unit is not resident. Never throws: a failure is kept for rethrow(), and the unit is
  /// bound to zeros, because the operator will run whatever happens here.
  void touch(int unit, const char* operator_name) noexcept;
  /// The outermost operator has ended: what it touched may go.
  void operator_ended() noexcept;
  /// An operator is about to write into a unit. Refused (rethrow() throws) outside of GatheredParameters.
  void on_write(int unit, const char* operator_name) noexcept;

  /// An operator is about to read a cast of a unit (a tracked one), after touch().
  void on_cast_read(int unit, c10::StorageImpl& cast, const char* operator_name) noexcept;

  // -- for the engine --
  /// Local. From now on the reductions' order is that of the gathers.
  void share_order_with(Reductions reductions) { reductions_ = std::move(reductions); }
  /// Local. Whether the order is a recorded one now, so that reductions are issued by it.
  bool follows_recorded_order();
  /// Collective at stage 3 (prefetch). Starts recording or replaying the order of use.
  void begin_pass(Pass pass);
  /// Collective. Leaves a pass that will not be finished: evaluation begins.
  void drop_pass();
  /// Collective. The pass will touch nothing more: issues what the plan still holds. To be called before
  /// waiting for anything else of the other ranks, which may stand in an operator that needs those gathers.
  void finish_gathers();
  /// Collective. Issues what the plan still holds; adopts the trace after a recorded pass.
  void end_pass();
  /// Local. The shards are about to get new values, until parameters_updated(): waits
  /// for gathers in flight, refuses readers.
  void begin_update();
  /// Collective. The shards of trainable units (`frozen_too`: and of frozen ones) have
  /// new values: resident copies are stale.
  void parameters_updated(bool frozen_too = false);
  /// Local. Throws the first failure met inside an operator.
  void rethrow();
  /// Local. For failures met where nothing may be thrown.
  void keep_failure(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }

  // -- for GatheredParameters and whole-model access --
  /// Collective. Makes units resident and pinned until unpin(); all ranks with
  /// the same units. Throws CommError.
  void pin(const std::vector<int>& units, bool writable);
  /// Local, unless the gathers of a pass go on: then align() comes first.
  void unpin(const std::vector<int>& units, bool writable);
  /// Collective. Brings all ranks to the same place of the plan, so that what changes it changes it alike.
  void align(const char* why);
  /// Local. Waits for gathers in flight.
  void wait_all();

  const ResidencyCounts& counts() const { return counts_; }
  const ResidencyCounts& previous_counts() const { return previous_counts_; }
  int num_resident() const;
  int max_resident() const { return max_resident_; }  ///< highest num_resident() since the last update
  const BufferPool& pool() const { return pool_; }
  CastTracker& casts() { return casts_; }
  bool sharded() const { return options_.sharded; }
  /// Whether a GatheredParameters with a modifier_rank holds the unit.
  bool writable(int unit) const { return states_[unit].writable > 0; }
  bool tracks_casts() const { return options_.sharded && options_.track_casts; }

 private:
  struct State {
    comm::WorkPtr gather;      // in flight; the unit is guarded until it is done
    bool resident = true;      // has a buffer which, once `gather` is done, is current
    bool by_operator = false;  // touched by the operator that runs
    int pins = 0;
    int writable = 0;
    at::Tensor shared;  // what the unit is bound to when it is not being written
    int64_t last_use = 0;
  };
  enum class Mode { kRecord, kReplay, kOnDemand };
  struct Recording {
    std::optional<Trace> trace;
    std::map<std::set<int>, GatherPlan> plans;  // by what is resident at the start
  };

  using Lock = std::unique_lock<std::recursive_mutex>;
  Lock enter(const char* what);
  bool another_thread_inside() const { return !touched_.empty() && inside_ != std::this_thread::get_id(); }
  void touch_beside(int unit, const char* operator_name);
  void ensure_resident(int unit, const char* operator_name);
  void make_readable(int unit);
  void record(int unit);
  void replay(int unit, const char* operator_name);
  void leave_plan(int unit, const char* operator_name);
  void issue_reductions(int count) {
    if (reductions_) reductions_->issue_until(count);
  }
  int num_reductions_issued() const { return reductions_ ? reductions_->num_issued() : 0; }
  void advance_to(size_t position);
  void run_actions(size_t position);
  void finish_plan();
  void agree_on(int unit, const std::string& why);
  void make_room(int unit);
  void issue_gather(int unit);
  void begin_writing(int unit);
  void end_writing(int unit);
  void refuse_if_held(int unit) const;
  void finish_gather(int unit);
  void release(int unit);
  void fail(int unit) noexcept;
  bool pinned(const State& state) const { return state.by_operator || state.pins > 0; }
  bool shared(int unit) const { return !options_.shared.empty() && options_.shared[unit]; }
  bool persistent(int unit) const { return layout_.units()[unit].numel <= options_.persistence_numel; }
  std::set<int> resident_units() const;
  Recording& recording() { return recordings_[static_cast<int>(pass_)]; }

  const Layout& layout_;
  std::vector<UnitMemory>& units_;
  std::vector<at::Tensor>& shards_;
  comm::CommunicatorPtr comm_, calls_;
  ResidencyOptions options_;
  BufferPool pool_;
  CastTracker casts_;
  PlanBudget budget_;
  std::optional<Reductions> reductions_;

  std::recursive_mutex
      mutex_;  // guards what follows, and the binding of units; held while a gather is waited for
  std::vector<State> states_;
  std::thread::id inside_;     // the thread whose operator touched them
  std::vector<int> touched_;   // by the operator that runs
  std::vector<int> deferred_;  // to be released once unpinned
  int64_t operator_count_ = 0;

  Pass pass_ = Pass::kTrain;
  bool in_pass_ = false;
  Mode mode_ = Mode::kRecord;
  Recording recordings_[2];
  Trace recorded_;
  const GatherPlan* plan_ = nullptr;
  size_t position_ = 0;
  bool record_anew_ = false;

  bool updating_ = false;  // between begin_update() and parameters_updated()
  std::exception_ptr failure_;
  ResidencyCounts counts_, previous_counts_;
  int max_resident_ = 0;
};

}  // namespace tessera::zero
