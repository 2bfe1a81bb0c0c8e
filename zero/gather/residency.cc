#include "zero/gather/residency.h"

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "zero/memory/storage_access.h"

namespace tessera::zero {

/// What to do about ranks that need different units. See [Note: one order for all ranks].
constexpr std::string_view kOneOrder =
    ". At stage 3 all ranks have to need the same parameters in the same order: set zero_optimization.stage "
    "to 2, or run this part of the model, with its backward, while all ranks hold its parameters in one "
    "GatheredParameters";

static PlanBudget budget_of(const std::vector<ParamUnit>& units, const ResidencyOptions& options) {
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

Residency::Residency(std::vector<ParamUnit>& units, comm::CommunicatorPtr comm, comm::CommunicatorPtr calls,
                     const ResidencyOptions& options)
    : units_(units),
      comm_(std::move(comm)),
      calls_(std::move(calls)),
      options_(options),
      gathers_on_use_(std::any_of(units.begin(), units.end(),
                                  [](const ParamUnit& unit) { return unit.placement.sharded(); })),
      hears_reads_(std::ranges::any_of(units, [](const auto& unit) { return unit.placement.updates_shard; })),
      order_(budget_of(units, options)),
      cache_(units, comm_,
             {.max_free = options.capacity_units,
              .overlap = options.overlap,
              .secondary = options.secondary,
              .keep_failure =
                  [this](const std::exception_ptr& failure) { keep_failure(failure, /*thrown=*/true); },
              .update = options.late_update ? options.late_update : [](ParamUnit&) {}}),
      previous_counts_(cache_.counts) {
  TESSERA_CHECK(options_.capacity_units >= 1);
  some_rank_gathers_on_use_ = gathers_on_use_;
  if (options_.mesh.num_rows() > 1)
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
    cache_.follow_stream();
    if (order_.recording()) order_.record(index, operator_count_, reductions_ ? reductions_->num_ready() : 0);
    if (order_.replaying() && gathers_on_use_ && !failure_) replay(unit, operator_name);
    ensure_unsharded(unit, operator_name);
    cache_.uses(unit);
  } catch (...) {
    refuse(unit, std::current_exception());
  }
}

/// See [Note: one thread at a time].
void Residency::on_use_beside(ParamUnit& unit, const char* operator_name) {
  const bool stays = unit.unsharded() && (unit.use.pinned() || !gathers_on_use_);
  try {
    if (updating_)
      throw Error(str(operator_name, " reads ", unit.name, " on one thread while another one is in step()"));
    if (!stays)
      throw Error(str(operator_name, " reads ", unit.name,
                      " on a second thread while another thread is inside an "
                      "operator of the same model: at stage 3 one thread at a time may run it"));
    cache_.follow_stream();
    make_readable(unit);
    cache_.uses(unit);
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
    cache_.reshard_unpinned();
  } catch (...) {
    failure_.keep(std::current_exception());
  }
}

void Residency::on_write(int unit, const at::Tensor& written, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (units_[unit].use.writers > 0) return;
  const bool max_norm = std::string_view(operator_name) == "aten::embedding_renorm_";
  refuse(
      units_[unit],
      std::make_exception_ptr(Error(str(
          operator_name, " writes into ", units_[unit].name, ": parameter ",
          options_.parameter_at(unit, written.storage_offset()),
          " belongs to the engine, and the write would be undone by the next step, or differ between ranks. ",
          max_norm ? "Leave max_norm out, and limit the norm of the rows that the embedding returns"
                   : "Write inside a GatheredParameters with modifier_rank set, or use load_weights()"))));
}

// Its unit was gathered and the cast was not: it is one of values from before an update, or something has
// failed.
void Residency::on_cast_read(int unit, c10::StorageImpl& cast, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (CastTracker::readable(cast)) return cache_.uses(cast);
  operator_refused_ = true;
  failure_.keep(std::make_exception_ptr(Error(str(operator_name, " reads a cast of ", units_[unit].name,
                                                  " that autocast made before the last step(), and "
                                                  "that is not kept: run forward again before backward"))));
  refuse_access(cast, failure_.message());
}

void Residency::track_cast(const CastSource& source, const at::Tensor& copy) {
  const Lock lock(mutex_);
  cache_.casts().add(source, copy);
}

void Residency::ensure_unsharded(ParamUnit& unit, const char* operator_name) {
  if (unit.unsharded()) return make_readable(unit);
  if (failure_) return refuse(unit, nullptr);
  agree_on(unit);
  cache_.make_room(unit, order_.budget());
  cache_.unshard(unit);
  ++cache_.counts.agreed_gathers;
  cache_.wait(unit);
}

/// Of an unsharded unit.
void Residency::make_readable(ParamUnit& unit) {
  flush_to(unit);
  cache_.wait(unit);
  if (!unit.memory.bound()) throw Error(str("the gather of ", unit.name, " has failed before"));
}

/// Its gather is still to be issued.
bool Residency::is_behind(const ParamUnit& unit) const {
  return std::find(deferred_gathers_.begin(), deferred_gathers_.end(), unit.index) != deferred_gathers_.end();
}

void Residency::flush_to(const ParamUnit& unit) {
  if (!is_behind(unit)) return;
  const auto issue_next = [&] {
    const int next = deferred_gathers_.front();
    deferred_gathers_.pop_front();
    cache_.unshard(units_[next]);
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

void Residency::replay(const ParamUnit& unit, const char* operator_name) {
  const size_t place = order_.place();
  if (order_.at(place).unit == unit.index) return;
  if (place < order_.last_place() && order_.at(place + 1).unit == unit.index) return advance_to(place + 1);
  if (unit.unsharded()) return;
  for (size_t p = place + 2; p <= order_.last_place(); ++p) {
    if (reductions_ && order_.at(p).reductions > 0 && !reductions_->under_way())
      break;                                                    // a use in backward only
    if (order_.at(p).unit == unit.index) return advance_to(p);  // this rank skips what lies between
  }
  leave_plan(unit, operator_name);
}

void Residency::leave_plan(const ParamUnit& unit, const char* operator_name) {
  if (reductions_ && comm_->size() > 1) {
    // Whether the rest of the plan has reductions in it must be the same everywhere.
    const bool mine = reductions_->under_way();
    const std::vector<bool> in_backward = agree(mine, str(unit.name, " outside of the recorded order"));
    const auto name_of = [](bool backward) { return backward ? "backward" : "forward"; };
    for (int rank = 0; rank < comm_->size(); ++rank)
      if (in_backward[rank] != mine)
        throw CommError(str("rank ", comm_->global_rank(comm_->rank()), " needs ", unit.name,
                            " outside of the recorded order in ", name_of(mine), ", rank ",
                            comm_->global_rank(rank), " in ", name_of(in_backward[rank]), kOneOrder));
  }
  finish_plan();
  options_.log.debug(str(operator_name, " reads ", unit.name, " outside of the recorded order"));
  order_.leave();
}

void Residency::issue_reductions(int count) {
  if (reductions_) reductions_->issue_until(count);
}

void Residency::advance_to(size_t place) {
  while (order_.place() < place) {
    issue_reductions(order_.at(order_.place() + 1).reductions);
    cache_.run(order_.advance());
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
    throw CommError(str(error.what(), kOneOrder));
  }
}

template <class T>
std::vector<T> Residency::exchange_in_row(const T& mine, const char* label) {
  const std::vector<T> all = calls_->exchange(mine, label);
  std::vector<T> row;
  for (int rank = 0; rank < calls_->size(); ++rank)
    if (options_.mesh.in_my_row(rank)) row.push_back(all[static_cast<size_t>(rank)]);
  return row;
}

bool Residency::follows_recorded_order() {
  const Lock lock(mutex_);
  return order_.replaying() && gathers_on_use_;
}

// --------------------------------------------------------------------------------------------- passes

Residency::Lock Residency::enter(const char* what) {
  Lock lock(mutex_);
  if (another_thread_inside())
    throw Error(str(what,
                    " while another thread is inside an operator over the same model's parameters: one "
                    "thread at a time may use an engine and its model"));
  return lock;
}

void Residency::begin_pass(Pass pass) {
  const Lock lock = enter("a new pass begins");
  drop_pass();
  order_.begin(pass);
  previous_counts_ = std::exchange(cache_.counts, {std::vector<int>(units_.size()), 0});
  if (!order_.replaying() || !gathers_on_use_) return;
  order_.make_plan(cache_.kept_units());
  if (pass == Pass::kEvaluation) cache_.expect(order_.plan());
  cache_.run(order_.plan().actions.front());
}

void Residency::drop_pass() {
  const Lock lock = enter("a pass is left");
  rethrow();
  if (!order_.in_pass()) return;
  // Ranks may stand at different places of the plan.
  const std::vector<size_t> places = exchange_in_row(order_.place(), "end of an unfinished pass");
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

void Residency::begin_update() {
  const Lock lock = enter("step()");
  cache_.follow_stream();
  cache_.wait_all();
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

/// In the order the next forward reads them, so that it can start on the first while the rest arrive.
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
  cache_.reset_max();
  const std::vector<ParamUnit*> updated = updated_units(frozen_too);
  for (const ParamUnit* unit : updated)
    if (unit->use.pins > 0 && unit->unsharded())
      throw Error(str("step() while a GatheredParameters holds ", unit->name));
  for (ParamUnit* unit : updated) {
    if (unit->placement.sharded()) {
      cache_.drop(*unit);
    } else if (options_.late_update) {
      unit->memory.guard();
      deferred_gathers_.push_back(unit->index);
    } else {
      cache_.unshard(*unit);
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
    const std::exception_ptr no_memory = cache_.take_buffers(missing);
    const std::vector<int> kNoMemory{-1};
    if (no_memory && calls_->size() == 1) std::rethrow_exception(no_memory);
    if (calls_->size() > 1) {
      const std::vector<std::vector<int>> wanted =
          calls_->exchange(no_memory ? kNoMemory : missing, "GatheredParameters");
      for (int rank = 0; rank < calls_->size(); ++rank) {
        if (wanted[rank] == kNoMemory) {
          if (no_memory) std::rethrow_exception(no_memory);
          cache_.give_buffers_back(missing);
          throw Error(str("GatheredParameters: rank ", rank, " has no memory for the parameters"));
        }
        if (options_.mesh.in_my_row(rank) && wanted[rank] != missing)
          throw CommError(str("GatheredParameters: rank ", calls_->rank(), " needs units [",
                              join(missing, " "), "], rank ", rank, " needs [", join(wanted[rank], " "),
                              "]: every rank must gather the same parameters"));
      }
    }
    for (int unit : missing) {
      cache_.unshard(units_[unit]);
      cache_.reshard_when_unpinned(units_[unit]);  // unless the plan takes it over
    }
  }
  std::vector<int> pinned;
  try {
    for (int index : units) {
      ParamUnit& unit = units_[index];
      cache_.wait(unit);
      // Until the writes of one rank are every rank's, each rank writes into its own copy.
      if (writable && unit.use.writers == 0) unit.begin_private_writes(cache_.pool());
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
  for (const Progress& theirs : exchange_in_row(Progress{order_.place(), num_reductions_issued()}, why)) {
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
    --unit.use.pins;
    if (writable && --unit.use.writers == 0) unit.end_private_writes(cache_.pool());
  }
  cache_.reshard_unpinned();
}

void Residency::wait_all() {
  const Lock lock(mutex_);
  cache_.wait_all();
}

}  // namespace tessera::zero
