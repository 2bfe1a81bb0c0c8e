#include "zero/gather/unit_cache.h"

#include <algorithm>
#include <utility>

#include "core/memory/allocation_failure.h"

namespace tessera::zero {

UnitCache::UnitCache(std::vector<ParamUnit>& units, comm::CommunicatorPtr comm, const Options& options)
    : counts{std::vector<int>(units.size()), 0},
      units_(units),
      comm_(std::move(comm)),
      options_(options),
      pool_(device_of(units), options.max_free),
      streams_(device_of(units)) {}

template <class Function>
auto UnitCache::or_kept(const Function& function) {
  try {
    return function();
  } catch (...) {
    options_.keep_failure(std::current_exception());
    throw;
  }
}

void UnitCache::unshard(ParamUnit& unit) {
  wait(unit);
  or_kept([&] {
    follow_stream();  // what is in the buffer may still be read on another one
    options_.update(unit);
    take_buffer(unit);
    if (unit.secondary_current()) ++counts.secondary_gathers;
    unit.unshard(*comm_, options_.secondary.get());
  });
  ++counts.gathers[unit.index];
  max_unsharded_ = std::max(max_unsharded_, num_unsharded());
  if (!options_.overlap || (comm_->size() == 1 && !unit.arriving())) wait(unit);
}

void UnitCache::take_buffer(ParamUnit& unit) {
  if (unit.memory.has_buffer()) return;
  const MemoryForUnit for_it(unit.name);
  unit.memory.hold(pool_.acquire(unit.memory.bytes()));
}

std::exception_ptr UnitCache::take_buffers(const std::vector<int>& units) {
  try {
    for (const int unit : units) take_buffer(units_[unit]);
    return nullptr;
  } catch (...) {
    give_buffers_back(units);
    return std::current_exception();
  }
}

void UnitCache::give_buffers_back(const std::vector<int>& units) {
  for (const int unit : units)
    if (units_[unit].memory.has_buffer()) pool_.give_back(units_[unit].memory.release());
}

void UnitCache::wait(ParamUnit& unit) {
  if (or_kept([&] { return unit.wait_for_unshard(); })) casts_.recast(unit.index, unit.memory.full());
}

void UnitCache::wait_all() {
  for (ParamUnit& unit : units_) wait(unit);
}

void UnitCache::reshard(ParamUnit& unit) {
  wait(unit);
  casts_.release(unit.index);
  unit.reshard(pool_);
}

void UnitCache::reshard_unpinned() {
  std::vector<int> pinned;
  for (const int unit : std::exchange(deferred_, {})) {
    if (units_[unit].use.pinned()) {
      pinned.push_back(unit);
    } else if (units_[unit].unsharded()) {
      reshard(units_[unit]);
    }
  }
  deferred_ = std::move(pinned);
}

void UnitCache::expect(const GatherPlan& plan) {
  std::vector<OffloadedTensor*> shards;
  for (const std::vector<PlanAction>& actions : plan.actions)
    for (const PlanAction& action : actions) {
      if (action.kind != PlanAction::kUnshard) continue;
      const std::vector<OffloadedTensor*> on_disk = units_[action.unit].on_disk(kValues);
      shards.insert(shards.end(), on_disk.begin(), on_disk.end());
    }
  OffloadedTensor::expect(shards);
}

void UnitCache::run(const std::vector<PlanAction>& actions) {
  for (const PlanAction& action : actions) {
    ParamUnit& unit = units_[action.unit];
    if (action.kind == PlanAction::kUnshard) {
      std::erase(deferred_, action.unit);
      // Pinned by a GatheredParameters, on all ranks: it is there already, and may have been written.
      if (unit.use.pins == 0 || !unit.unsharded()) unshard(unit);
    } else if (unit.use.pinned()) {
      reshard_when_unpinned(unit);
    } else if (unit.unsharded()) {
      reshard(unit);
    }
  }
}

void UnitCache::make_room(const ParamUnit& unit, const PlanBudget& budget) {
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

void UnitCache::drop(ParamUnit& unit) {
  casts_.forget(unit.index);
  if (unit.unsharded()) reshard(unit);
  unit.values_changed();
}

int UnitCache::num_unsharded() const {
  return static_cast<int>(
      std::count_if(units_.begin(), units_.end(), [](const ParamUnit& unit) { return unit.unsharded(); }));
}

std::set<int> UnitCache::kept_units() const {
  std::set<int> kept;
  for (const ParamUnit& unit : units_)
    if (unit.unsharded() && std::find(deferred_.begin(), deferred_.end(), unit.index) == deferred_.end())
      kept.insert(unit.index);
  return kept;
}

}  // namespace tessera::zero
