// Residency: which units are resident (readable in full) at any moment, and the collectives that make them so.
//
// At stage 3 it is a cache over the shards (see [Note: residency is a cache] in gather_plan.h); at stages 1 and 2 the
// units are always bound, and what is cached is whether the all-gather of the updated shards has arrived. Operators report
// what they are about to read through touch(); nobody else decides when to gather.
//
// [Note: one order for all ranks]
// A gather is a collective. While the order of use is unknown, each gather is agreed on by name first (exchange over
// the store), so ranks that differ get a CommError with rank and unit instead of a hang. Once a trace is adopted (rank
// 0's), every rank issues exactly the plan's gathers, in the plan's order: a rank that skips units issues their gathers
// when it moves on, or at the end of the pass; a rank that needs a unit the plan does not have first issues the rest
// of the plan, then asks the others as in the first pass, and the next pass records anew.
#pragma once

#include <chrono>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
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
  bool sharded = false;  ///< parameters are sharded (stage 3), and a gather moves them
  std::vector<bool> shared;  ///< by unit (empty: none): one memory for all ranks, see [Note: one copy on a host] in sharded_model.h
  bool overlap = true;   ///< false: wait for each gather where it is issued, prefetch nothing
  int capacity_units = 3;
  int64_t max_live_numel = 1'000'000'000;
  int64_t prefetch_numel = 50'000'000;
  int64_t persistence_numel = 100'000;  ///< units up to this size stay resident between updates
  std::chrono::milliseconds agreement_timeout = std::chrono::seconds(60);
  Logger log;
};

enum class Pass { kTrain, kEvaluation };

/// Counters of the pass in progress and the one before (for tests, metrics and the curious).
struct ResidencyCounts {
  std::vector<int> gathers;  ///< by unit
  int agreed_gathers = 0;    ///< of these, gathers the ranks had to agree on one by one
};

/// One rank's units. Used by one thread at a time. `units[i]` and `shards[i]` belong to Layout unit i; both
/// must outlive it. `shards[i]` is slice rank of units[i].full() when parameters are not sharded.
class Residency {
 public:
  Residency(const Layout& layout, std::vector<UnitMemory>& units, std::vector<at::Tensor>& shards,
            comm::CommunicatorPtr comm, const ResidencyOptions& options);
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
  /// Collective at stage 3 (prefetch). Starts recording or replaying the order of use.
  void begin_pass(Pass pass);
  /// Collective. Leaves a pass that will not be finished: evaluation begins.
  void drop_pass();
  /// Collective. The pass will touch nothing more: issues what the plan still holds. To be called before waiting for
  /// anything else of the other ranks, which may stand in an operator that needs those gathers.
  void finish_gathers() { finish_plan(); }
  /// Collective. Issues what the plan still holds; adopts the trace after a recorded pass.
  void end_pass();
  /// Collective. The shards of trainable units (`frozen_too`: and of frozen ones) have new values: resident copies are stale.
  void parameters_updated(bool frozen_too = false);
  /// Local. Throws the first failure met inside an operator.
  void rethrow();
  /// Local. For failures met where nothing may be thrown.
  void keep_failure(std::exception_ptr failure) {
    if (!failure_) failure_ = std::move(failure);
  }

  // -- for GatheredParameters and whole-model access --
  /// Collective. Makes units resident and pinned until unpin(); all ranks with the same units. Throws CommError.
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

 private:
  struct State {
    comm::WorkPtr gather;  // in flight
    bool resident = true;  // bound and, once `gather` is done, current
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

  void ensure_resident(int unit, const char* operator_name);
  void record(int unit);
  void replay(int unit, const char* operator_name);
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
  comm::CommunicatorPtr comm_;
  ResidencyOptions options_;
  BufferPool pool_;
  CastTracker casts_;
  PlanBudget budget_;

  std::vector<State> states_;
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

  std::exception_ptr failure_;
  ResidencyCounts counts_, previous_counts_;
  int max_resident_ = 0;
};

}  // namespace tessera::zero
