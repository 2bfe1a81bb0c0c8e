#include "zero/sharded_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include <algorithm>
#include <exception>

#include "comm/memory/cpu_allocator.h"
#include "comm/torch_dtype.h"
#include "core/check.h"
#include "core/error.h"
#include "zero/deferred/deferred_model.h"
#include "zero/reduce/gradient_hook.h"

namespace tessera::zero {

ShardedModel::ShardedModel(const ModelView& model, comm::CommunicatorPtr comm,
                           const ShardedModelOptions& options)
    : options_(options), comm_(std::move(comm)), state_(model.state) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  ParameterList list = list_parameters(model, options_.compute_dtype);
  if (list.specs.empty()) throw ConfigError("the model has no parameters");
  if (options_.group_of)
    for (ParameterSpec& spec : list.specs) {
      spec.group = options_.group_of(spec.name);
      if (spec.group != ShardedModelOptions::kUntrained) continue;
      spec.trainable = false;
      spec.group = 0;
    }
  layout_ = std::make_unique<Layout>(list.specs, LayoutOptions{comm_->size(), options_.unit_numel});
  check_same_model_everywhere();
  if (model.program && comm_->size() > 1) check_same_program(model.program(), *comm_);
  refuse_forks(model, options_.sharding);
  refuse_other_holders(model, [&](const std::string& what) { options_.residency.log.warning(what); });
  parameters_ = list.tensors;
  make_groups();
  connect_to_host();
  make_offload_store();
  if (model.deferred != nullptr) begin_values(model);
  move_into_units(model.deferred);
  adopt_buffers();
  if (model.deferred != nullptr) model.deferred->finish(*comm_);

  gathered_ = std::any_of(units_.begin(), units_.end(),
                          [](const ParamUnit& unit) { return unit.placement.updates_shard; });
  const bool one_order = !gather_comm_->wait_blocks();  // [Note: one order on a device] in residency.h
  if (options_.tiers.any_below_device())
    options_.residency.late_update = [this](ParamUnit& unit) {
      update_parameters([&] { optimizer_->update(unit); });
    };
  options_.residency.parameter_at = [this](int unit, int64_t element) {
    for (const int parameter : units_[unit].spec.parameters)
      if (intersect(layout_->slice(parameter).range(), {element, element + 1}).numel() > 0)
        return layout_->parameters()[parameter].name;
    return units_[unit].name;
  };
  residency_ = std::make_unique<Residency>(units_, gather_comm_, comm_, options_.residency);
  gradients_ = std::make_unique<GradientReducer>(
      *layout_, units_, parameters_, one_order ? gather_comm_ : row_group("reduce"), options_.reducer);
  connect_reductions_and_gathers(one_order);
  optimizer_ = std::make_unique<ShardedOptimizer>(*layout_, units_, comm_, options_.optimizer);
  // TorchScript's fuser hands raw pointers to compiled kernels, which no listener hears of. (A switch of the
  // process.)
  if (model.scripted && gathered_) torch::jit::setTensorExprFuserEnabled(false);
  listener_.emplace(gathered_ && options_.residency.track_casts);
  versions_.emplace(*layout_, units_, parameters_);
  taken_ = std::make_unique<TakenGradients>(*layout_, parameters_);
  free_gradients();
  drop_gradients_of_untrained();  // last: the destructor removes hooks, and does not run where this throws
  begin_pass(Pass::kTrain);
}

// The model may be read once its engine is gone, unless its parameters are sharded: the last updates have to
// arrive.
ShardedModel::~ShardedModel() {
  for (const at::Tensor& parameter : untrained_) GradientHook::remove(this, parameter);
  try {
    if (residency_ && !residency_->gathers_on_use() && std::uncaught_exceptions() == 0) {
      finish_updates();
      residency_->wait_all();
    }
  } catch (const std::exception&) {
    // The rank that failed says so itself.
  }
  host_thread_.reset();
  try {
    if (options_.transfer) options_.transfer->synchronize();  // then no copy uses what goes now
  } catch (const std::exception&) {
    // What failed on the device is known.
  }
}

void ShardedModel::check_same_model_everywhere() const {
  int64_t numel = 0;
  for (const ParameterSpec& spec : layout_->parameters()) numel += spec.numel();
  const std::string mine = str(layout_->parameters().size(), " parameters of ", numel, " elements, digest ",
                               std::hex, layout_->digest());
  const std::vector<std::string> all = comm_->exchange(mine, "model layout");
  for (int rank = 0; rank < comm_->size(); ++rank)
    if (all[rank] != mine)
      throw CommError(str("rank ", comm_->rank(), "'s model has ", mine, "; rank ", rank, "'s has ",
                          all[rank], ": all ranks must build the same model"));
}

/// See [Note: making a model without memory] in zero/deferred/deferred_model.h.
void ShardedModel::begin_values(const ModelView& model) {
  DeferredModel::Plan plan;
  plan.parameters = parameters_;
  plan.first_rank = comm_->rank() == 0;
  plan.keeps_generators = static_cast<bool>(options_.loaded_next);
  for (const ParameterSpec& spec : layout_->parameters()) {
    // Loading may ask for any of the names.
    const bool is_loaded = options_.loaded_next && options_.loaded_next(spec.name) &&
                           std::all_of(spec.aliases.begin(), spec.aliases.end(), options_.loaded_next);
    plan.computed.push_back(plan.first_rank && !is_loaded);
  }
  for (const NamedTensor& buffer : buffers()) plan.buffers.push_back(buffer.tensor);
  model.deferred->begin(std::move(plan));
}

// Unit by unit, so that never more than one unit exists twice. What stays is allocated before, so that one
// unit's buffer finds the room that the last one's has left.
void ShardedModel::move_into_units(DeferredModel* deferred) {
  units_.reserve(layout_->num_units());
  for (int unit = 0; unit < layout_->num_units(); ++unit)
    units_.emplace_back(*layout_, unit,
                        UnitOptions{.sharding = options_.sharding,
                                    .tiers = options_.tiers,
                                    .device = options_.device,
                                    .mesh = mesh_,
                                    .store = offload_store_.get(),
                                    .transfer = options_.transfer.get()},
                        *gather_comm_);
  const auto write_value = [&](int parameter, at::Tensor flat) {
    if (deferred != nullptr)
      deferred->fill(parameter, std::move(flat));
    else if (comm_->rank() == 0)  // the others receive its values
      flat.copy_(parameters_[parameter].reshape(-1));
  };
  for (ParamUnit& unit : units_)
    unit.move_in(parameters_, *layout_, *gather_comm_, write_value,
                 [&](const at::Tensor& flat) { broadcast_from_rank_0(flat, unit.name); });
}

void ShardedModel::connect_reductions_and_gathers(bool one_order) {
  if (one_order && residency_->gathers_on_use()) {
    residency_->share_order_with({.under_way = [this] { return gradients_->under_way(); },
                                  .num_ready = [this] { return gradients_->num_ready(); },
                                  .num_issued = [this] { return gradients_->num_issued(); },
                                  .issue_until = [this](int count) { gradients_->issue_until(count); }});
    gradients_->issued_from_outside = [this] { return residency_->follows_recorded_order(); };
  }
  gradients_->check = [this] { residency_->rethrow(); };
  gradients_->before_waiting = [this] { residency_->finish_gathers(); };
}

bool ShardedModel::host_shared() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const ParamUnit& unit) { return unit.placement.host_shared(); });
}

// ----------------------------------------------------------------------------------------- the step

void ShardedModel::begin_pass(Pass pass) {
  if (gathered_) residency_->begin_pass(pass);
}

void ShardedModel::train() {
  if (!std::exchange(training_, true)) begin_pass(Pass::kTrain);
}

void ShardedModel::eval() {
  broadcast_buffers();
  if (std::exchange(training_, false) && gathered_) residency_->drop_pass();
}

void ShardedModel::begin_forward() {
  if (!training_) begin_pass(Pass::kEvaluation);
}

void ShardedModel::end_forward() {
  residency_->rethrow();
  if (!training_ && gathered_) residency_->end_pass();
}

static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// What `function` throws, every later call throws too, until drop_gradients() or a checkpoint puts it right.
/// Of an exception that is not ours only the text is kept: one of Python's holds the frames of its traceback,
/// and so whatever owns this model.
template <class Function>
auto ShardedModel::or_unusable(const Function& function) {
  try {
    return function();
  } catch (const Error&) {
    failure_ = std::current_exception();
    if (offload_store_) parameters_incomplete_ = true;  // what a disk has failed to keep may be anything
    throw;
  } catch (const std::exception& error) {
    residency_->rethrow();  // an operator has thrown it in libtorch's words
    failure_ = std::make_exception_ptr(
        Error(str("an earlier backward() or step() failed and left gradients or parameters incomplete: ",
                  first_line(error.what()))));
    throw;
  }
}

void ShardedModel::backward(const at::Tensor& loss, MicroStep micro_step) {
  residency_->rethrow();
  taken_->leave();  // what the last backward() has left in grad(), if nobody has called check_gradients()
  or_unusable([&] {
    if (micro_step.first) finish_updates();  // its gradients are in the accumulators
    gradients_->begin_backward(micro_step.first, micro_step.last);
    torch::autograd::backward({loss}, {});
    residency_->rethrow();
    gradients_->finish_backward();
    taken_->stand_in(gradients_->used());
    if (gathered_) residency_->end_pass();
    if (!micro_step.last) begin_pass(Pass::kTrain);
  });
}

GradientSummary ShardedModel::summarize_gradients(bool raise_flag) {
  taken_->leave();  // late gradients are taken from grad()
  return or_unusable([&] {
    GradientSummary summary = summarize(*layout_, units_, *gradients_, *comm_, raise_flag);
    if (!summary.late_units.empty()) {
      gradients_->reduce_late(summary.late_units);
      const GradientSummary before = std::move(summary);
      summary = summarize(*layout_, units_, *gradients_, *comm_, /*raise_flag=*/false);
      summary.late_units = before.late_units;
      summary.flag_raised = before.flag_raised;
    }
    used_ = summary.used;
    return summary;
  });
}

/// Of what `function` throws parameters stay incomplete.
template <class Function>
void ShardedModel::update_parameters(const Function& function) {
  try {
    function();
  } catch (...) {
    parameters_incomplete_ = true;
    throw;
  }
}

void ShardedModel::update(double grad_scale) {
  try {
    update_parameters([&] {
      optimizer_->begin_step(*gradients_, grad_scale, used_, residency_->order_of_first_use());
      if (!options_.tiers.any_below_device()) optimizer_->finish_step();
    });
  } catch (...) {
    // What operators that run from now on are told.
    residency_->keep_failure(std::current_exception(), /*thrown=*/true);
    throw;
  }
}

void ShardedModel::begin_step() {
  comm::cpu_allocator_step();
  if (offload_store_) offload_store_->begin_step();
}

void ShardedModel::step(double grad_scale) {
  const PauseListening our_own_operators;
  TESSERA_CHECK(used_.size() == parameters_.size(), "step() without summarize_gradients() before it");
  or_unusable([&] {
    if (gathered_) residency_->begin_update();
    begin_step();
    update(grad_scale);
    gradients_->done_reading();
    for (int parameter = 0; parameter < layout_->num_parameters(); ++parameter)
      if (used_[parameter]) versions_->written_by_engine(parameter);
    used_.clear();
    if (gathered_) residency_->parameters_updated();
    begin_pass(Pass::kTrain);
  });
}

void ShardedModel::finish_updates() {
  if (!options_.tiers.any_below_device()) return;
  or_unusable([&] {
    residency_->flush_deferred_gathers();
    update_parameters([&] { optimizer_->finish_step(); });
    for (ParamUnit& unit : units_) unit.follow_values();
  });
}

void ShardedModel::skip_step() {
  or_unusable([&] {
    begin_step();
    begin_pass(Pass::kTrain);
  });
}

// ------------------------------------------------------------------------------------- the whole model

int ShardedModel::find(const std::string& name) const {
  const int parameter = layout_->find(name);
  if (parameter < 0) throw Error(str("the model has no parameter named ", name));
  return parameter;
}

at::Tensor ShardedModel::gather_parameter(int parameter, const at::Tensor& mine, bool whole,
                                          std::string_view what) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  return cut_out(parameter, gather_unit(layout_->slice(parameter).unit, mine, whole, what));
}

at::Tensor ShardedModel::full_parameter(const std::string& name) {
  const int parameter = find(name);
  finish_updates();
  residency_->wait_all();
  ParamUnit& unit = units_[layout_->slice(parameter).unit];
  const InMemory weights(unit, kUpdated, InMemory::Access::kRead);
  const bool whole = !unit.placement.updates_shard;
  return gather_parameter(parameter, (whole ? unit.local_state() : unit.piece_state()).weights, whole,
                          "parameters");
}

at::Tensor ShardedModel::full_gradient(const std::string& name) {
  const int parameter = find(name);
  ParamUnit& unit = units_[layout_->slice(parameter).unit];
  if (!unit.spec.trainable) throw Error(str("parameter ", name, " is frozen and has no gradient"));
  const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
  const bool whole = !unit.placement.updates_shard && !gradients_->reads_peers();
  return gather_parameter(parameter, whole ? unit.gradient.accumulator : gradients_->piece(unit), whole,
                          "gradient");
}

void ShardedModel::pin(const std::vector<int>& units, bool writable) {
  finish_updates();
  residency_->pin(units, writable);
}

void ShardedModel::unpin(const std::vector<int>& units, int modifier_rank) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  residency_->align("end of GatheredParameters");
  const bool written = modifier_rank >= 0;
  if (written && options_.transfer) options_.transfer->synchronize();  // copies read what is written here
  for (int index : written ? units : std::vector<int>()) {
    ParamUnit& unit = units_[index];
    for (int parameter : unit.spec.parameters) versions_->allow(parameter);
    const at::Tensor& full = unit.memory.full();
    if (comm_->size() > 1) comm_->broadcast(full, modifier_rank, unit.name)->wait();
    const InMemory weights(unit, kUpdated, InMemory::Access::kReadWrite);
    // What was written lies in another memory than the shard.
    if (unit.placement.parameters != Placement::Parameters::kWhole)
      unit.shard.copy_(full.narrow(0, unit.shard_range.begin, unit.shard_range.numel()));
    unit.values_changed();
    unit.publish_private_writes(gather_comm_->host_rank());
    if (!unit.has_own_master()) continue;
    // Keep the fp32 digits of what was not written.
    const at::Tensor value = unit.local(full).to(unit.master.device());
    unit.master.copy_(
        at::where(unit.master.to(value.scalar_type()) == value, unit.master, value.to(at::kFloat)));
  }
  if (written && host_shared()) gather_comm_->barrier("end of GatheredParameters");
  residency_->unpin(units, written);
}

// --------------------------------------------------------------------------------- what this rank keeps

StateBytes ShardedModel::measured_bytes(Tier tier) const {
  StateBytes bytes;
  for (const ParamUnit& unit : units_) bytes += unit.bytes(tier);
  return bytes;
}

StateBytes ShardedModel::formula_bytes(bool async_checkpoints, Tier tier) const {
  return model_state_bytes(*layout_, state_model(async_checkpoints), tier);
}

StateModel ShardedModel::state_model(bool async_checkpoints) const {
  return {.sharding = options_.sharding,
          .accumulate_dtype = from_torch(options_.reducer.accumulate_dtype),
          .one_copy_a_host = host_shared(),
          .ranks_a_host = gather_comm_->host_rank().num_ranks,
          .num_states = static_cast<int>(state_names().size()),
          .async_checkpoints = async_checkpoints && !offload_store_ && options_.device.is_cpu(),
          .tiers = {.parameters = options_.tiers.parameters,
                    .optimizer = options_.tiers.optimizer,
                    .device_memory_is_separate = host_apart_},
          .groups = options_.groups};
}

}  // namespace tessera::zero
