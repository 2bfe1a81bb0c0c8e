#include "zero/residency.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "core/check.h"

namespace tessera::zero {

Residency::Residency(const Layout& layout, std::vector<UnitMemory>& units, std::vector<at::Tensor>& shards,
                     comm::CommunicatorPtr comm, comm::CommunicatorPtr calls, const ResidencyOptions& options)
    : layout_(layout),
      units_(units),
      shards_(shards),
      comm_(std::move(comm)),
      calls_(std::move(calls)),
      options_(options),
      pool_(units.empty() ? at::Device(at::kCPU) : units.front().full().device(), options.capacity_units),
      states_(units.size()) {
  TESSERA_CHECK(options_.capacity_units >= 1);
  budget_.capacity_units = options_.capacity_units;
  budget_.capacity_numel = options_.max_live_numel;
  budget_.prefetch_numel = options_.overlap ? options_.prefetch_numel : 0;
  for (int unit = 0; unit < layout_.num_units(); ++unit) {
    budget_.unit_numel.push_back(layout_.units()[unit].numel);
    budget_.persistent.push_back(persistent(unit));
    states_[unit].resident = units_[unit].bound();
    units_[unit].set_residency(this);
  }
  counts_.gathers.resize(units.size());
  previous_counts_ = counts_;
}

Residency::~Residency() {
  for (UnitMemory& unit : units_) unit.set_residency(nullptr);
}

// ---------------------------------------------------------------------------------------- operators

void Residency::touch(int unit, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (another_thread_inside() || updating_) return touch_beside(unit, operator_name);
  inside_ = std::this_thread::get_id();
  State& state = states_[unit];
  if (!state.by_operator) {
    state.by_operator = true;
    touched_.push_back(unit);
  }
  state.last_use = operator_count_;
  try {
    if (in_pass_ && mode_ == Mode::kRecord) record(unit);
    if (in_pass_ && mode_ == Mode::kReplay && options_.sharded && !failure_) replay(unit, operator_name);
    ensure_resident(unit, operator_name);
  } catch (...) {
    fail(unit);
  }
}

/// See [Note: one thread at a time].
void Residency::touch_beside(int unit, const char* operator_name) {
  const State& state = states_[unit];
  const bool stays = state.resident && (pinned(state) || !options_.sharded);
  try {
    if (updating_)
      throw Error(str(operator_name, " reads ", layout_.describe(unit),
                      " on one thread while another one is in step()"));
    if (!stays)
      throw Error(str(operator_name, " reads ", layout_.describe(unit),
                      " on a second thread while another thread is inside an "
                      "operator of the same model: at stage 3 one thread at a time may run it"));
    make_readable(unit);
  } catch (...) {
    fail(unit);
  }
}

void Residency::operator_ended() noexcept {
  const Lock lock(mutex_);
  if (inside_ != std::this_thread::get_id()) return;
  ++operator_count_;
  for (int unit : touched_) states_[unit].by_operator = false;
  touched_.clear();
  if (deferred_.empty() || failure_) return;
  try {
    std::vector<int> waiting;
    for (int unit : std::exchange(deferred_, {})) {
      if (pinned(states_[unit])) {
        waiting.push_back(unit);
      } else if (states_[unit].resident) {
        release(unit);
      }
    }
    deferred_ = std::move(waiting);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Residency::on_write(int unit, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (states_[unit].writable > 0 || failure_) return;
  failure_ = std::make_exception_ptr(Error(
      str(operator_name, " writes into ", layout_.describe(unit),
          ", whose values are kept in shards. Write inside a GatheredParameters with modifier_rank set.")));
}

// Its unit was gathered and the cast was not: it is one of values from before
// an update, or something has failed.
void Residency::on_cast_read(int unit, c10::StorageImpl& cast, const char* operator_name) noexcept {
  const Lock lock(mutex_);
  if (CastTracker::readable(cast)) return;
  if (!failure_)
    failure_ = std::make_exception_ptr(Error(str(operator_name, " reads a cast of ", layout_.describe(unit),
                                                 " that autocast made before the last step(), and that is "
                                                 "not kept: run forward again before backward")));
  CastTracker::bind_zeros(cast);
}

void Residency::ensure_resident(int unit, const char* operator_name) {
  State& state = states_[unit];
  if (state.resident) return make_readable(unit);
  if (failure_) return fail(unit);
  agree_on(unit, operator_name);
  make_room(unit);
  issue_gather(unit);
  ++counts_.agreed_gathers;
  finish_gather(unit);
}

/// Of a resident unit.
void Residency::make_readable(int unit) {
  if (states_[unit].gather) finish_gather(unit);
  if (!units_[unit].bound()) fail(unit);  // its gather has failed before
}

void Residency::record(int unit) {
  if (!recorded_.empty() && recorded_.back().unit == unit) {
    recorded_.back().last_operator = operator_count_;
  } else {
    recorded_.push_back({unit, operator_count_, operator_count_, reductions_ ? reductions_->num_ready() : 0});
  }
}

void Residency::replay(int unit, const char* operator_name) {
  const Trace& trace = *recording().trace;
  if (trace[position_].unit == unit) return;
  if (position_ + 1 < trace.size() && trace[position_ + 1].unit == unit) return advance_to(position_ + 1);
  if (states_[unit].resident) return;
  for (size_t p = position_ + 2; p < trace.size(); ++p) {
    if (reductions_ && trace[p].reductions > 0 && !reductions_->under_way()) break;  // a use in backward only
    if (trace[p].unit == unit) return advance_to(p);  // this rank skips what lies between
  }
  leave_plan(unit, operator_name);
}

void Residency::leave_plan(int unit, const char* operator_name) {
  if (reductions_ && comm_->size() > 1) {
    // Whether the rest of the plan has reductions in it must be the same everywhere.
    const std::string mine = reductions_->under_way() ? "backward" : "forward";
    const std::vector<std::string> where =
        comm_->exchange(mine, str(layout_.describe(unit), " outside of the recorded order"));
    for (int rank = 0; rank < comm_->size(); ++rank)
      if (where[rank] != mine)
        throw CommError(str("rank ", comm_->rank(), " needs ", layout_.describe(unit),
                            " outside of the recorded order in ", mine, ", rank ", rank, " in ", where[rank],
                            ": every rank must run the same operators over sharded parameters"));
  }
  finish_plan();
  options_.log.debug(str(operator_name, " reads ", layout_.describe(unit), " outside of the recorded order"));
  mode_ = Mode::kOnDemand;
  record_anew_ = true;
}

void Residency::advance_to(size_t position) {
  while (position_ < position) {
    ++position_;
    issue_reductions((*recording().trace)[position_].reductions);
    run_actions(position_);
  }
}

void Residency::run_actions(size_t position) {
  for (const PlanAction& action : plan_->actions[position]) {
    State& state = states_[action.unit];
    if (action.kind == PlanAction::kGather) {
      std::erase(deferred_, action.unit);
      // Held by a GatheredParameters, on all ranks: it is there already, and may have been written.
      if (state.pins == 0 || !state.resident) issue_gather(action.unit);
    } else if (pinned(state)) {
      deferred_.push_back(action.unit);
    } else if (state.resident) {
      release(action.unit);
    }
  }
}

void Residency::finish_plan() {
  if (in_pass_ && mode_ == Mode::kReplay && options_.sharded) advance_to(recording().trace->size() - 1);
}

void Residency::agree_on(int unit, const std::string& why) {
  if (comm_->size() == 1) return;
  const std::string label = str("gather of ", layout_.describe(unit), " for ", why);
  const std::vector<std::string> all = comm_->exchange(str(unit, ' ', num_reductions_issued()), label);
  int farthest = 0;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    int wanted = -1, issued = 0;
    std::istringstream(all[rank]) >> wanted >> issued;
    if (wanted != unit)
      throw CommError(str("rank ", comm_->rank(), " needs ", layout_.describe(unit), " for ", why,
                          ", but rank ", rank, " needs ", layout_.describe(wanted),
                          ": every rank must run the same operators over sharded parameters"));
    farthest = std::max(farthest, issued);
  }
  issue_reductions(farthest);
}

bool Residency::follows_recorded_order() {
  const Lock lock(mutex_);
  return in_pass_ && mode_ == Mode::kReplay && options_.sharded;
}

void Residency::make_room(int unit) {
  if (persistent(unit)) return;
  while (true) {
    int live = 0, victim = -1;
    int64_t live_numel = 0;
    for (int other = 0; other < layout_.num_units(); ++other) {
      const State& state = states_[other];
      if (!state.resident || persistent(other)) continue;
      ++live;
      live_numel += budget_.unit_numel[other];
      if (!pinned(state) && (victim < 0 || state.last_use < states_[victim].last_use)) victim = other;
    }
    const bool fits =
        live + 1 <= budget_.capacity_units && live_numel + budget_.unit_numel[unit] <= budget_.capacity_numel;
    if (fits || victim < 0) return;
    release(victim);
  }
}

void Residency::issue_gather(int unit) {
  State& state = states_[unit];
  if (state.gather) finish_gather(unit);
  if (units_[unit].has_buffer()) {
    units_[unit].guard();
  } else {
    units_[unit].hold(pool_.acquire(units_[unit].bytes()));
  }
  state.resident = true;
  max_resident_ = std::max(max_resident_, num_resident());
  ++counts_.gathers[unit];
  try {
    state.gather = comm_->all_gather(units_[unit].contents(), shards_[unit], layout_.describe(unit));
  } catch (...) {
    keep_failure(std::current_exception());
    throw;
  }
  if (!options_.overlap || comm_->size() == 1) finish_gather(unit);
}

void Residency::finish_gather(int unit) {
  const comm::WorkPtr work = std::exchange(states_[unit].gather, nullptr);
  if (!work) return;
  try {
    work->wait();
  } catch (...) {
    keep_failure(std::current_exception());
    throw;
  }
  units_[unit].bind();
  casts_.recast(unit, units_[unit].full());
}

void Residency::release(int unit) {
  finish_gather(unit);
  casts_.release(unit);
  pool_.give_back(units_[unit].release());
  states_[unit].resident = false;
}

// libtorch swallows what a callback throws and runs the operator anyway: give it zeros to read, keep the
// error. (What a gather has left behind half-way is for nobody to read.)
void Residency::fail(int unit) noexcept {
  if (!failure_) failure_ = std::current_exception();
  State& state = states_[unit];
  state.gather = nullptr;
  if (!units_[unit].bound())
    units_[unit].bind(at::zeros({units_[unit].bytes()},
                                at::TensorOptions().dtype(at::kByte).device(units_[unit].full().device())));
  state.resident = true;
}

// ------------------------------------------------------------------------------------------- engine

Residency::Lock Residency::enter(const char* what) {
  Lock lock(mutex_);
  if (another_thread_inside())
    throw Error(str(what,
                    " while another thread is inside an operator over the same model's parameters: one "
                    "thread at a time may "
                    "use an engine and its model"));
  return lock;
}

void Residency::begin_pass(Pass pass) {
  const Lock lock = enter("a new pass begins");
  drop_pass();
  pass_ = pass;
  in_pass_ = true;
  position_ = 0;
  record_anew_ = false;
  previous_counts_ = std::exchange(counts_, ResidencyCounts{std::vector<int>(units_.size()), 0});
  Recording& recording = this->recording();
  mode_ = recording.trace ? Mode::kReplay : Mode::kRecord;
  recorded_.clear();
  if (mode_ != Mode::kReplay || !options_.sharded) return;
  const std::set<int> resident = resident_units();
  auto found = recording.plans.find(resident);
  if (found == recording.plans.end())
    found = recording.plans.emplace(resident, make_plan(*recording.trace, resident, budget_)).first;
  plan_ = &found->second;
  run_actions(0);
}

void Residency::drop_pass() {
  const Lock lock = enter("a pass is left");
  rethrow();
  if (!in_pass_) return;
  // Ranks may stand at different places of the plan.
  const std::vector<std::string> positions =
      calls_->exchange(std::to_string(position_), "end of an unfinished pass");
  if (std::any_of(positions.begin(), positions.end(), [](const std::string& p) { return p != "0"; }))
    finish_plan();
  in_pass_ = false;
}

void Residency::finish_gathers() {
  const Lock lock = enter("a backward pass ends");
  finish_plan();
}

void Residency::end_pass() {
  const Lock lock = enter("a pass ends");
  rethrow();
  if (!in_pass_) return;
  finish_plan();
  if (mode_ == Mode::kRecord) {
    // Ranks may have re-read resident units in another order; rank 0's trace serves all.
    const std::vector<std::string> traces = comm_->exchange(serialize(recorded_), "order of use");
    Trace trace = parse_trace(traces.front());
    if (!trace.empty()) recording() = {std::move(trace), {}};
  } else if (record_anew_) {
    recording() = {};
  }
  in_pass_ = false;
}

void Residency::begin_update() {
  const Lock lock = enter("step()");
  wait_all();
  updating_ = true;
}

void Residency::parameters_updated(bool frozen_too) {
  const Lock lock = enter("step()");
  TESSERA_CHECK(!in_pass_);
  updating_ = false;
  max_resident_ = 0;
  if (options_.sharded) {
    for (int unit = 0; unit < layout_.num_units(); ++unit) {
      State& state = states_[unit];
      if (!layout_.units()[unit].trainable && !frozen_too) continue;
      casts_.forget(unit);
      if (!state.resident) continue;
      refuse_if_held(unit);
      release(unit);
    }
    return;
  }
  // In the order the next forward reads them, so that it can start on the first while the rest arrive.
  std::vector<int> order;
  std::vector<bool> listed(units_.size(), false);
  const auto add = [&](int unit) {
    const bool updated = layout_.units()[unit].trainable || (frozen_too && shared(unit));
    if (!listed[unit] && updated) order.push_back(unit);
    listed[unit] = true;
  };
  const Recording& train = recordings_[static_cast<int>(Pass::kTrain)];
  if (train.trace)
    for (const Touch& touch : *train.trace) add(touch.unit);
  for (int unit = 0; unit < layout_.num_units(); ++unit) add(unit);
  for (int unit : order) refuse_if_held(unit);
  for (int unit : order) issue_gather(unit);
}

void Residency::refuse_if_held(int unit) const {
  if (states_[unit].pins > 0)
    throw Error(str("step() while a GatheredParameters holds ", layout_.describe(unit)));
}

void Residency::rethrow() {
  const Lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

// ------------------------------------------------------------------------------------------ pinning

void Residency::pin(const std::vector<int>& units, bool writable) {
  const Lock lock = enter("GatheredParameters");
  rethrow();
  align("start of GatheredParameters");
  if (options_.sharded) {
    std::vector<int> missing;
    for (int unit : units)
      if (!states_[unit].resident) missing.push_back(unit);
    if (comm_->size() > 1) {
      const std::string mine = join(missing, " ");
      const std::vector<std::string> wanted = comm_->exchange(mine, "GatheredParameters");
      for (int rank = 0; rank < comm_->size(); ++rank) {
        if (wanted[rank] != mine)
          throw CommError(str("GatheredParameters: rank ", comm_->rank(), " needs units [", mine, "], rank ",
                              rank, " needs [", wanted[rank],
                              "]: every rank must gather the same parameters"));
      }
    }
    for (int unit : missing) {
      issue_gather(unit);
      deferred_.push_back(unit);  // goes when unpinned, unless the plan takes it over
    }
  }
  for (int unit : units) {
    ++states_[unit].pins;
    if (states_[unit].gather) finish_gather(unit);
    if (writable && states_[unit].writable++ == 0) begin_writing(unit);
  }
}

// Until the writes of one rank are everybody's, each rank sees its own: in a memory of its own.
void Residency::begin_writing(int unit) {
  if (!shared(unit)) return;
  State& state = states_[unit];
  at::Tensor buffer = pool_.acquire(units_[unit].bytes());
  std::memcpy(buffer.data_ptr(), units_[unit].full().data_ptr(), static_cast<size_t>(units_[unit].bytes()));
  state.shared = units_[unit].release();
  units_[unit].bind(std::move(buffer));
}

void Residency::end_writing(int unit) {
  if (!states_[unit].shared.defined()) return;
  pool_.give_back(units_[unit].release());
  units_[unit].bind(std::exchange(states_[unit].shared, at::Tensor()));
}

void Residency::align(const char* why) {
  const Lock lock = enter(why);
  if (!options_.sharded || !in_pass_ || comm_->size() == 1) return;
  size_t farthest = 0;
  int most_issued = 0;
  for (const std::string& theirs : calls_->exchange(str(position_, ' ', num_reductions_issued()), why)) {
    size_t position = 0;
    int issued = 0;
    std::istringstream(theirs) >> position >> issued;
    farthest = std::max(farthest, position);
    most_issued = std::max(most_issued, issued);
  }
  if (mode_ == Mode::kReplay) advance_to(farthest);
  issue_reductions(most_issued);
}

void Residency::unpin(const std::vector<int>& units, bool writable) {
  const Lock lock(mutex_);
  for (int unit : units) {
    State& state = states_[unit];
    --state.pins;
    if (writable && --state.writable == 0) end_writing(unit);
    if (!pinned(state) && std::erase(deferred_, unit) > 0) release(unit);
  }
}

void Residency::wait_all() {
  const Lock lock(mutex_);
  for (int unit = 0; unit < layout_.num_units(); ++unit) finish_gather(unit);
}

int Residency::num_resident() const {
  return static_cast<int>(
      std::count_if(states_.begin(), states_.end(), [](const State& s) { return s.resident; }));
}

std::set<int> Residency::resident_units() const {
  std::set<int> resident;
  for (int unit = 0; unit < layout_.num_units(); ++unit)
    if (states_[unit].resident && std::find(deferred_.begin(), deferred_.end(), unit) == deferred_.end())
      resident.insert(unit);
  return resident;
}

}  // namespace tessera::zero
