#include "zero/gather/residency.h"

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "core/memory/allocation_failure.h"
#include "zero/memory/pause_listening.h"
#include "zero/memory/storage_access.h"

namespace tessera::zero {

/// What to do about ranks that need different units. See [Note: one order for all ranks].
constexpr std::string_view kOneOrder =
    ". At stage 3 all ranks have to need the same parameters in the same order: set zero_optimization.stage "
    "to 2, or run this part of the model, with its backward, while all ranks hold its parameters in one "
    "GatheredParameters";

PlanBudget budget_of(const std::vector<ParamUnit>& units, const ResidencyOptions& options) {
  PlanBudget budget;
  budget.capacity_units = options.capacity_units;
  budget.capacity_numel = options.max_live_numel;
  budget.prefetch_numel = options.overlap ? options.prefetch_numel : 0;
  for (const ParamUnit& unit : units) {
    budget.unit_numel.push_back(unit.spec.numel);
    budget.persistent.push_back(unit.spec.numel <= options.persistence_numel);
  }
  return budget;
}

Residency::Residency(const Layout& layout, std::vector<ParamUnit>& units, CollectiveOrder& order,
                     comm::CommunicatorPtr comm, comm::CommunicatorPtr calls, const ResidencyOptions& options)
    : layout_(layout),
      units_(units),
      order_(order),
      comm_(std::move(comm)),
      calls_(std::move(calls)),
      options_(options),
      gathers_on_use_(any_sharded(units)),
      hears_reads_(any_updates_shard(units)),
      pool_({.device = device_of(units), .max_free = options.capacity_units}),
      streams_(device_of(units)),
      counts_{std::vector<int>(units.size()), 0},
      previous_counts_(counts_) {
  TESSERA_CHECK(options_.capacity_units >= 1);
  some_rank_gathers_on_use_ = gathers_on_use_;
  if (options_.mesh.num_replicas() > 1)
    for (const int theirs : calls_->exchange(gathers_on_use_ ? 1 : 0, "gathers on use"))
      some_rank_gathers_on_use_ |= theirs != 0;
  for (ParamUnit& unit : units_) unit.memory.set_residency(this);
}

Residency::~Residency() {
  for (ParamUnit& unit : units_) unit.memory.set_residency(nullptr);
}

// ---------------------------------------------------------------------------------------- operators

void Residency::on_use(int index, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  ParamUnit& unit = units_[index];
  if (another_thread_inside() || updating_) return on_use_beside(unit, operator_name);
  inside_ = std::this_thread::get_id();
  if (!unit.use.by_operator) {
    unit.use.by_operator = true;
    used_.push_back(index);
  }
  unit.use.last_operator = operator_count_;
  try {
    streams_.follow();
    if (order_.recording()) order_.record(index, operator_count_);
    if (order_.replaying() && gathers_on_use_ && !failure_) replay(unit);
    ensure_unsharded(unit);
    uses(unit);
  } catch (...) {
    refuse(unit, std::current_exception());
  }
}

/// See [Note: one thread at a time].
void Residency::on_use_beside(ParamUnit& unit, const char* operator_name) {
  const bool stays = unit.unsharded() && (unit.use.pinned() || !gathers_on_use_);
  try {
    if (updating_)
      throw Error(operator_name, " reads ", unit.name, " on one thread while another one is in step()");
    if (!stays)
      throw Error(operator_name, " reads ", unit.name,
                  " on a second thread while another thread is inside an "
                  "operator of the same model: at stage 3 one thread at a time may run it");
    streams_.follow();
    make_readable(unit);
    uses(unit);
  } catch (...) {
    refuse(unit, std::current_exception());
  }
}

void Residency::operator_ended() noexcept {
  const Lock lock(mutex_);
  // It has thrown what it could not read. (A view reads nothing.)
  if (operator_refused_ && std::uncaught_exceptions() > 0) {
    operator_refused_ = false;
    failure_.was_thrown();
  }
  if (inside_ != std::this_thread::get_id()) return;
  ++operator_count_;
  for (int unit : used_) units_[unit].use.by_operator = false;
  used_.clear();
  if (failure_) return;
  try {
    reshard_unpinned();
  } catch (...) {
    failure_.keep(std::current_exception());
  }
}

void Residency::on_write(int unit, const at::Tensor& written, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (units_[unit].use.writers > 0) return;
  const int parameter = layout_.parameter_at(unit, written.storage_offset());
  const bool max_norm = std::string_view(operator_name) == "aten::embedding_renorm_";
  refuse(
      units_[unit],
      std::make_exception_ptr(Error(
          operator_name, " writes into ", units_[unit].name, ": parameter ",
          parameter < 0 ? units_[unit].name : layout_.parameters()[parameter].name,
          " belongs to the engine, and the write would be undone by the next step, or differ between ranks. ",
          max_norm ? "Leave max_norm out, and limit the norm of the rows that the embedding returns"
                   : "Write inside a GatheredParameters with modifier_rank set, or use load_weights()",
          "; if all ranks have made this write, zero_grad() on all of them undoes it")));
}

// Its unit was gathered and the cast was not: it is one of values from before an update, or something has
// failed.
void Residency::on_cast_read(int unit, c10::StorageImpl& cast, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (const at::DataPtr& memory = CastTracker::memory_of(cast)) return streams_.uses(memory);
  operator_refused_ = true;
  failure_.keep(std::make_exception_ptr(Error(operator_name, " reads a cast of ", units_[unit].name,
                                              " that autocast made before the last step(), and "
                                              "that is not kept: run forward again before backward")));
  refuse_access(cast, failure_.message());
}

void Residency::track_cast(const CastSource& source, const at::Tensor& copy) {
  const Lock lock(mutex_);
  casts_.add(source, copy);
}

void Residency::ensure_unsharded(ParamUnit& unit) {
  if (unit.unsharded()) return make_readable(unit);
  if (failure_) return refuse(unit, nullptr);
  agree_on(unit);
  make_room(unit);
  unshard(unit);
  ++counts_.agreed_gathers;
  wait(unit);
}

/// Makes an unsharded unit readable.
void Residency::make_readable(ParamUnit& unit) {
  flush_to(unit);
  wait(unit);
  if (!unit.memory.bound()) throw Error("the gather of ", unit.name, " has failed before");
}

/// Its gather is still to be issued.
bool Residency::is_deferred(const ParamUnit& unit) const {
  return std::find(deferred_gathers_.begin(), deferred_gathers_.end(), unit.index) != deferred_gathers_.end();
}

void Residency::flush_to(const ParamUnit& unit) {
  if (!is_deferred(unit)) return;
  const auto issue_next = [&] {
    const int next = deferred_gathers_.front();
    deferred_gathers_.pop_front();
    unshard(units_[next]);
    return next;
  };
  while (issue_next() != unit.index) {
  }
  if (!deferred_gathers_.empty() && options_.overlap && comm_->size() > 1)
    issue_next();  // while this one is used
}

void Residency::flush_deferred_gathers() {
  const Lock lock = enter("backward()");
  while (!deferred_gathers_.empty()) flush_to(units_[deferred_gathers_.back()]);
}

void Residency::replay(const ParamUnit& unit) {
  const size_t place = order_.place();
  if (order_.at(place).unit == unit.index) return;
  if (place < order_.last_place() && order_.at(place + 1).unit == unit.index) return advance_to(place + 1);
  if (unit.unsharded()) return;
  for (size_t p = place + 2; p <= order_.last_place(); ++p) {
    if (order_.at(p).reductions > 0 && !order_.reductions.in_backward()) break;  // a use in backward only
    if (order_.at(p).unit == unit.index) return advance_to(p);  // this rank skips what lies between
  }
  leave_plan(unit);
}

void Residency::leave_plan(const ParamUnit& unit) {
  if (order_.one_order() && comm_->size() > 1) {
    // Whether the rest of the plan has reductions in it must be the same everywhere.
    const bool mine = order_.reductions.in_backward();
    const std::vector<bool> in_backward = agree(mine, str(unit.name, " outside of the recorded order"));
    const auto name_of = [](bool backward) { return backward ? "backward" : "forward"; };
    for (int rank = 0; rank < comm_->size(); ++rank)
      if (in_backward[rank] != mine)
        throw CommError("rank ", comm_->global_rank(comm_->rank()), " needs ", unit.name,
                        " outside of the recorded order in ", name_of(mine), ", rank ",
                        comm_->global_rank(rank), " in ", name_of(in_backward[rank]), kOneOrder);
  }
  finish_plan();
  order_.leave();
}

void Residency::issue_reductions(int count) {
  if (order_.one_order()) options_.issue_reductions(count);
}

int Residency::num_reductions_issued() const {
  return order_.one_order() && order_.reductions.in_backward() ? order_.reductions.num_issued() : 0;
}

void Residency::advance_to(size_t place) {
  while (order_.place() < place) {
    issue_reductions(order_.at(order_.place() + 1).reductions);
    run(order_.advance());
  }
}

void Residency::finish_plan() {
  if (order_.replaying() && gathers_on_use_) advance_to(order_.last_place());
}

void Residency::agree_on(const ParamUnit& unit) {
  if (comm_->size() == 1) return;
  // Ranks may need it for different operators. The label is compared, so it does not name them.
  const std::vector<int> issued = agree(num_reductions_issued(), str("gather of ", unit.name));
  issue_reductions(*std::max_element(issued.begin(), issued.end()));
}

template <class T>
std::vector<T> Residency::agree(const T& mine, const std::string& label) {
  try {
    return comm_->exchange(mine, label);
  } catch (const comm::RanksDiffer& error) {
    throw CommError(error.what(), kOneOrder);
  }
}

template <class T>
std::vector<T> Residency::exchange_in_shard_group(const T& mine, const char* label) {
  const std::vector<T> all = calls_->exchange(mine, label);
  std::vector<T> group;
  for (int rank = 0; rank < calls_->size(); ++rank)
    if (options_.mesh.in_my_shard_group(rank)) group.push_back(all[static_cast<size_t>(rank)]);
  return group;
}

bool Residency::reductions_have_places() {
  const Lock lock(mutex_);
  return order_.reductions_have_places();
}

// --------------------------------------------------------------------------------------------- passes

Residency::Lock Residency::enter(const char* what) {
  Lock lock(mutex_);
  if (another_thread_inside())
    throw Error(what,
                " while another thread is inside an operator over the same model's parameters: one "
                "thread at a time may use an engine and its model");
  return lock;
}

void Residency::begin_pass(Pass pass) {
  const Lock lock = enter("a new pass begins");
  drop_pass();
  order_.begin(pass);
  previous_counts_ = std::exchange(counts_, {std::vector<int>(units_.size()), 0});
  if (!order_.replaying() || !gathers_on_use_) return;
  order_.make_plan(kept_units());
  if (pass == Pass::kEvaluation) read_ahead(order_.plan());
  run(order_.plan().actions.front());
}

void Residency::drop_pass() {
  const Lock lock = enter("a pass is left");
  rethrow();
  if (!order_.in_pass()) return;
  // Ranks may stand at different places of the plan.
  const std::vector<size_t> places = exchange_in_shard_group(order_.place(), "end of an unfinished pass");
  if (std::any_of(places.begin(), places.end(), [](size_t place) { return place != 0; })) finish_plan();
  order_.drop();
}

void Residency::finish_gathers() {
  const Lock lock = enter("a backward pass ends");
  finish_plan();
}

void Residency::end_pass() {
  const Lock lock = enter("a pass ends");
  rethrow();
  if (!order_.in_pass()) return;
  finish_plan();
  Trace trace;
  // Ranks may have re-read unsharded units in another order; rank 0's trace serves all.
  if (order_.recording()) trace = comm_->exchange(order_.recorded(), "order of use").front();
  order_.end(std::move(trace));
}

void Residency::refuse_held(std::string_view call, bool frozen_too) const {
  const Lock lock(mutex_);
  for (const ParamUnit* unit : updated_units(frozen_too))
    if (unit->use.pins > 0)
      throw Error(call, " inside of a GatheredParameters that holds ", unit->name,
                  ": its parameters would change; leave it first");
}

void Residency::begin_update() {
  const Lock lock = enter("step()");
  streams_.follow();
  wait_all();
  updating_ = true;
}

std::vector<int> Residency::order_of_first_use() const {
  std::vector<int> order;
  std::vector<bool> listed(units_.size(), false);
  const auto add = [&](int unit) {
    if (!listed[unit]) order.push_back(unit);
    listed[unit] = true;
  };
  if (const Trace* trace = order_.recorded_order(Pass::kTrain))
    for (const Use& use : *trace) add(use.unit);
  for (const ParamUnit& unit : units_) add(unit.index);
  return order;
}

/// Returns the units in the order the next forward reads them, so that it can start on the first while the
/// rest arrive.
std::vector<ParamUnit*> Residency::updated_units(bool frozen_too) const {
  std::vector<ParamUnit*> updated;
  for (const int index : order_of_first_use()) {
    ParamUnit& unit = units_[index];
    if (unit.placement.updates_shard && (unit.spec.trainable || frozen_too)) updated.push_back(&unit);
  }
  return updated;
}

void Residency::parameters_updated(bool frozen_too) {
  const Lock lock = enter("step()");
  TESSERA_CHECK(!order_.in_pass());
  updating_ = false;
  deferred_gathers_.clear();  // what an update that failed has left there
  max_unsharded_ = 0;
  for (ParamUnit* unit : updated_units(frozen_too)) {
    if (unit->placement.sharded()) {
      drop(*unit);
    } else if (options_.deferred_update) {
      unit->memory.guard();
      deferred_gathers_.push_back(unit->index);
    } else {
      unshard(*unit);
    }
  }
}

// ------------------------------------------------------------------------------------------ pinning

void Residency::pin(const std::vector<int>& units, bool writable) {
  const Lock lock = enter("GatheredParameters");
  rethrow();
  align("start of GatheredParameters");
  if (some_rank_gathers_on_use_) {
    std::vector<int> missing;
    for (int unit : units)
      if (!units_[unit].unsharded()) missing.push_back(unit);
    // Without memory on one rank, none issues a gather, and training can continue.
    const std::exception_ptr no_memory = take_buffers(missing);
    const std::vector<int> kNoMemory{-1};
    if (no_memory && calls_->size() == 1) std::rethrow_exception(no_memory);
    if (calls_->size() > 1) {
      const std::vector<std::vector<int>> wanted =
          calls_->exchange(no_memory ? kNoMemory : missing, "GatheredParameters");
      for (int rank = 0; rank < calls_->size(); ++rank) {
        if (wanted[rank] == kNoMemory) {
          if (no_memory) std::rethrow_exception(no_memory);
          give_buffers_back(missing);
          throw Error("GatheredParameters: rank ", rank, " has no memory for the parameters");
        }
        if (options_.mesh.in_my_shard_group(rank) && wanted[rank] != missing)
          throw CommError("GatheredParameters: rank ", calls_->rank(), " needs units [", join(missing, " "),
                          "], rank ", rank, " needs [", join(wanted[rank], " "),
                          "]: every rank must gather the same parameters");
      }
    }
    for (int unit : missing) {
      unshard(units_[unit]);
      resharded_when_unpinned_.push_back(unit);  // unless the plan takes it over
    }
  }
  std::vector<int> pinned;
  try {
    for (int index : units) {
      ParamUnit& unit = units_[index];
      wait(unit);
      // Until the writes of one rank are every rank's, each rank writes into its own copy.
      if (writable && unit.use.writers == 0) unit.begin_private_writes(pool_);
      ++unit.use.pins;
      if (writable) ++unit.use.writers;
      pinned.push_back(index);
    }
  } catch (...) {
    unpin(pinned, writable);
    throw;
  }
}

void Residency::align(const char* why) {
  const Lock lock = enter(why);
  if (!some_rank_gathers_on_use_ || !order_.in_pass() || calls_->size() == 1) return;
  struct Progress {
    size_t place;
    int reductions_issued;
  };
  Progress farthest{0, 0};
  for (const Progress& theirs :
       exchange_in_shard_group(Progress{order_.place(), num_reductions_issued()}, why)) {
    farthest.place = std::max(farthest.place, theirs.place);
    farthest.reductions_issued = std::max(farthest.reductions_issued, theirs.reductions_issued);
  }
  if (!gathers_on_use_) return;
  if (order_.replaying()) advance_to(farthest.place);
  issue_reductions(farthest.reductions_issued);
}

void Residency::unpin(const std::vector<int>& units, bool writable) {
  const Lock lock(mutex_);
  for (int index : units) {
    ParamUnit& unit = units_[index];
    // Ranks have used different ones of them, and make room alike.
    if (--unit.use.pins == 0) unit.use.last_operator = operator_count_;
    if (writable && --unit.use.writers == 0) unit.end_private_writes(pool_);
  }
  ++operator_count_;  // what was held is used later than what was before, also where no operator has read it
  reshard_unpinned();
}

// --------------------------------------------------------------------------------------------- gathers

template <class Function>
auto Residency::or_kept(const Function& function) {
  const BelowModes below_modes;  // also where no operator asks for the unit
  try {
    return function();
  } catch (...) {
    keep_failure(std::current_exception(), /*thrown=*/true);
    throw;
  }
}

void Residency::unshard(ParamUnit& unit) {
  wait(unit);
  or_kept([&] {
    streams_.follow();  // what is in the buffer may still be read on another one
    if (options_.deferred_update) options_.deferred_update(unit);
    take_buffer(unit);
    unit.unshard(*comm_, options_.secondary.get());
  });
  ++counts_.gathers[unit.index];
  max_unsharded_ = std::max(max_unsharded_, num_unsharded());
  if (!options_.overlap || (comm_->size() == 1 && !unit.arriving())) wait(unit);
}

void Residency::take_buffer(ParamUnit& unit) {
  if (unit.memory.has_buffer()) return;
  const MemoryForUnit for_it(unit.name);
  unit.memory.hold(pool_.acquire(unit.memory.bytes()).memory);
}

std::exception_ptr Residency::take_buffers(const std::vector<int>& units) {
  try {
    for (const int unit : units) take_buffer(units_[unit]);
    return nullptr;
  } catch (...) {
    give_buffers_back(units);
    return std::current_exception();
  }
}

void Residency::give_buffers_back(const std::vector<int>& units) {
  for (const int unit : units)
    if (units_[unit].memory.has_buffer()) pool_.give_back({units_[unit].memory.release()});
}

void Residency::wait(ParamUnit& unit) {
  if (!unit.gathering()) return;
  or_kept([&] {
    if (unit.wait_for_unshard()) casts_.recast(unit.index, unit.memory.full());
  });
}

void Residency::wait_all() {
  const Lock lock(mutex_);
  for (ParamUnit& unit : units_) wait(unit);
}

void Residency::reshard(ParamUnit& unit) {
  wait(unit);
  casts_.release(unit.index);
  unit.reshard(pool_);
}

void Residency::reshard_unpinned() {
  std::vector<int> pinned;
  for (const int unit : std::exchange(resharded_when_unpinned_, {})) {
    if (units_[unit].use.pinned()) {
      pinned.push_back(unit);
    } else if (units_[unit].unsharded()) {
      reshard(units_[unit]);
    }
  }
  resharded_when_unpinned_ = std::move(pinned);
}

/// A pass outside of training begins: what its plan gathers is read ahead, where it is on disk.
void Residency::read_ahead(const GatherPlan& plan) {
  std::vector<OffloadedTensor*> shards;
  for (const std::vector<PlanAction>& actions : plan.actions)
    for (const PlanAction& action : actions) {
      if (action.kind != PlanAction::kUnshard) continue;
      const std::vector<OffloadedTensor*> on_disk = units_[action.unit].on_disk(kValues);
      shards.insert(shards.end(), on_disk.begin(), on_disk.end());
    }
  OffloadedTensor::expect(shards);
}

void Residency::run(const std::vector<PlanAction>& actions) {
  for (const PlanAction& action : actions) {
    ParamUnit& unit = units_[action.unit];
    if (action.kind == PlanAction::kUnshard) {
      std::erase(resharded_when_unpinned_, action.unit);
      // Pinned by a GatheredParameters, on all ranks: it is there already, and may have been written.
      if (unit.use.pins == 0 || !unit.unsharded()) unshard(unit);
    } else if (unit.use.pinned()) {
      resharded_when_unpinned_.push_back(unit.index);
    } else if (unit.unsharded()) {
      reshard(unit);
    }
  }
}

void Residency::make_room(const ParamUnit& unit) {
  const PlanBudget& budget = order_.budget();
  if (budget.persistent[unit.index]) return;
  while (true) {
    int live = 0;
    int64_t live_numel = 0;
    ParamUnit* victim = nullptr;
    for (ParamUnit& other : units_) {
      if (!other.unsharded() || budget.persistent[other.index]) continue;
      ++live;
      live_numel += other.spec.numel;
      if (!other.use.pinned() && (victim == nullptr || other.use.last_operator < victim->use.last_operator))
        victim = &other;
    }
    const bool fits =
        live + 1 <= budget.capacity_units && live_numel + unit.spec.numel <= budget.capacity_numel;
    if (fits || victim == nullptr) return;
    reshard(*victim);
  }
}

void Residency::drop(ParamUnit& unit) {
  casts_.forget(unit.index);
  if (unit.unsharded()) reshard(unit);
  unit.values_changed();
}

int Residency::num_unsharded() const {
  return static_cast<int>(
      std::count_if(units_.begin(), units_.end(), [](const ParamUnit& unit) { return unit.unsharded(); }));
}

std::set<int> Residency::kept_units() const {
  std::set<int> kept;
  for (const ParamUnit& unit : units_)
    if (unit.unsharded() &&
        std::ranges::find(resharded_when_unpinned_, unit.index) == resharded_when_unpinned_.end())
      kept.insert(unit.index);
  return kept;
}

// -------------------------------------------------------------------------------------------- failures

/// Null stands for the failure that is kept.
void Residency::refuse(ParamUnit& unit, const std::exception_ptr& failure) noexcept {
  if (failure) failure_.keep(failure);
  unit.memory.refuse(failure_.message());
  operator_refused_ = true;
}

void Residency::rethrow() {
  const Lock lock(mutex_);
  failure_.rethrow();
}

void Residency::keep_failure(const std::exception_ptr& failure, bool thrown) {
  const Lock lock(mutex_);
  thrown ? failure_.keep_thrown(failure) : failure_.keep(failure);
}

bool Residency::has_failure() const {
  const Lock lock(mutex_);
  return static_cast<bool>(failure_);
}

void Residency::forget_failure() {
  const Lock lock = enter("a failed step is left");
  failure_.clear();
  wait_all();
  for (ParamUnit& unit : units_) {
    if (is_deferred(unit) || unit.readable_again()) continue;
    if (unit.placement.sharded()) {
      drop(unit);
    } else {
      unshard(unit);
    }
  }
  drop_pass();
  reshard_unpinned();
}

}  // namespace tessera::zero
