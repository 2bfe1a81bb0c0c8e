#include "zero/sharded_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/init/agreement.h"
#include "comm/memory/cpu_allocator.h"
#include "comm/torch_dtype.h"
#include "core/check.h"
#include "core/error.h"
#include "core/memory/memory_use.h"
#include "core/str.h"
#include "zero/deferred/deferred_model.h"
#include "zero/memory/pause_listening.h"
#include "zero/reduce/gradient_hook.h"

namespace tessera::zero {

ShardedModel::ShardedModel(const ModelView& model, comm::CommunicatorPtr comm,
                           const ShardedModelOptions& options)
    : options_(options), comm_(std::move(comm)), state_(model.state) {
  const OurOwnWork scope;
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

  gathered_ = any_updates_shard(units_);
  connect_gathers_and_reductions();
  options_.optimizer.parameters = parameters_;
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

void ShardedModel::check_same_model_everywhere() const {
  int64_t numel = 0;
  for (const ParameterSpec& spec : layout_->parameters()) numel += spec.numel();
  const std::string mine = str(layout_->parameters().size(), " parameters of ", numel, " elements, digest ",
                               std::hex, layout_->digest());
  const std::vector<std::string> all = comm_->exchange(mine, "model layout");
  for (int rank = 0; rank < comm_->size(); ++rank)
    if (all[rank] != mine)
      throw CommError("rank ", comm_->rank(), "'s model has ", mine, "; rank ", rank, "'s has ", all[rank],
                      ": all ranks must build the same model");
}

void ShardedModel::make_groups() {
  const GroupSizes& sizes = options_.groups;
  for (const int size : {sizes.shard, sizes.secondary})
    TESSERA_CHECK(size == 0 || (options_.sharding.parameters && size > 0 && comm_->size() % size == 0),
                  "groups of ", size, " of ", comm_->size(), " ranks");
  TESSERA_CHECK(sizes.shard == 0 || sizes.secondary == 0);
  TESSERA_CHECK(sizes.shard == 0 || options_.tiers.optimizer == Tier::kDevice);
  TESSERA_CHECK(sizes.secondary == 0 || options_.tiers.parameters == Tier::kDevice);
  mesh_ = mesh_of(sizes, comm_->size(), comm_->rank());
  gather_comm_ = shard_group("gather");
  options_.residency.mesh = mesh_;
  if (sizes.secondary > 0)
    options_.residency.secondary = comm_->split(mesh_.secondary_ranks(), "gather of the second copy");
  if (mesh_.num_replicas() > 1)
    replicas_ = options_.reducer.replicas = comm_->split(mesh_.replicate_group_ranks(), "replicas");
}

/// Collective.
comm::CommunicatorPtr ShardedModel::shard_group(const char* name) {
  return mesh_.num_replicas() > 1 ? comm_->split(mesh_.shard_group_ranks(), name) : comm_->duplicate(name);
}

/// See [Note: state on the host] in param_unit.h.
void ShardedModel::connect_to_host() {
  const bool connected = options_.tiers.any_below_device() && options_.transfer != nullptr;
  host_apart_ = connected || options_.tiers.device_memory_is_separate;
  options_.tiers.device_memory_is_separate = connected;
  if (!options_.tiers.device_memory_is_separate) {
    options_.transfer = nullptr;
    TESSERA_CHECK(options_.device.is_cpu() || !options_.tiers.any_below_device());
    return;
  }
  // Else the update's result would have to travel down.
  TESSERA_CHECK(options_.tiers.optimizer != Tier::kDevice, "parameters below the device, the optimizer not");
  host_thread_ = std::make_unique<comm::HostThread>(options_.device);
  options_.reducer.transfer = options_.optimizer.transfer = options_.transfer.get();
  options_.reducer.host = options_.optimizer.host = host_thread_.get();
  options_.offload.transfer = options_.transfer;
}

/// Collective: a rank whose disk is full ends all of them.
void ShardedModel::make_offload_store() {
  if (!options_.tiers.any_on_disk()) return;
  StateModel model = state_model();
  model.tiers = options_.tiers;
  std::vector<int64_t> sizes;
  for (const UnitSpec& unit : layout_->units()) {
    const StateBytes bytes =
        state_bytes(elements_of(unit.numel, comm_->size(), unit.dtype, unit.trainable, options_.groups),
                    model, Tier::kDisk);
    for (const int64_t one : {bytes.parameters, bytes.master, bytes.gradients})
      if (one > 0) sizes.push_back(one);
    if (bytes.optimizer > 0) sizes.insert(sizes.end(), model.num_states, bytes.optimizer / model.num_states);
  }
  comm::on_all_ranks<Error>(*comm_, "state on disk", [&] {
    const MemoryFor buffers(MemoryUse::kDiskBuffers);
    if (!sizes.empty())
      offload_store_ =
          std::make_unique<OffloadStore>(options_.offload, sizes, str("model state of rank ", comm_->rank()));
  });
}

/// See [Note: making a model without memory] in zero/deferred/deferred_model.h.
void ShardedModel::begin_values(const ModelView& model) {
  DeferredModel::Request request;
  request.parameters = parameters_;
  request.first_rank = comm_->rank() == 0;
  request.keeps_generators = static_cast<bool>(options_.loaded_next);
  for (const ParameterSpec& spec : layout_->parameters()) {
    // Loading may ask for any of the names.
    const bool is_loaded = options_.loaded_next && options_.loaded_next(spec.name) &&
                           std::all_of(spec.aliases.begin(), spec.aliases.end(), options_.loaded_next);
    request.computed.push_back(request.first_rank && !is_loaded);
  }
  for (const NamedTensor& buffer : buffers()) request.buffers.push_back(buffer.tensor);
  model.deferred->begin(std::move(request));
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

/// Sends to the first ranks of the replicas, and from there within each: where a shard group shares memory,
/// one of its ranks writes.
void ShardedModel::broadcast_from_rank_0(const at::Tensor& flat, const std::string& label) {
  if (replicas_ && mesh_.shard() == 0) replicas_->broadcast(flat, 0, label)->wait();
  if (gather_comm_->size() > 1) gather_comm_->broadcast(flat, 0, label)->wait();
}

/// See [Note: one order on a device] in collective_order.h.
void ShardedModel::connect_gathers_and_reductions() {
  const bool one_group = !gather_comm_->wait_blocks();
  order_ = std::make_unique<CollectiveOrder>(budget_of(units_, options_.residency),
                                             first_order_of_reductions(units_),
                                             /*one_order=*/one_group && any_sharded(units_));
  if (options_.tiers.any_below_device())
    options_.residency.deferred_update = [this](ParamUnit& unit) {
      update_parameters([&] { optimizer_->update(unit); });
    };
  options_.residency.issue_reductions = [this](int count) { gradients_->issue_until(count); };
  residency_ =
      std::make_unique<Residency>(*layout_, units_, *order_, gather_comm_, comm_, options_.residency);
  gradients_ =
      std::make_unique<GradientReducer>(*layout_, units_, parameters_, order_->reductions, residency_.get(),
                                        one_group ? gather_comm_ : shard_group("reduce"), options_.reducer);
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
/// If an exception is not ours, only its text is kept: one of Python's holds the frames of its traceback, and
/// so whatever owns this model.
template <class Function>
auto ShardedModel::or_unusable(const Function& function) {
  try {
    return function();
  } catch (const Error&) {
    failure_ = std::current_exception();
    if (offload_store_) parameters_incomplete_ = true;  // what a disk has failed to keep may be anything
    throw;
  } catch (const std::exception& error) {
    if (failure_) throw;    // update() has kept it
    residency_->rethrow();  // an operator has thrown it in libtorch's words
    failure_ = std::make_exception_ptr(
        Error("an earlier backward() or step() failed and left gradients or parameters incomplete: ",
              first_line(error.what())));
    throw;
  }
}

void ShardedModel::backward(const at::Tensor& loss, MicroStep micro_step) {
  residency_->rethrow();
  taken_->leave();  // what the last backward() has left in grad(), if nobody has called check_gradients()
  begin_backward(micro_step);
  or_unusable([&] { torch::autograd::backward({loss}, {}); });
  end_backward();
}

void ShardedModel::begin_backward(MicroStep micro_step) {
  or_unusable([&] {
    if (micro_step.first) finish_updates();  // its gradients are in the accumulators
    gradients_->begin_backward(micro_step.first, micro_step.last, micro_step.factor);
  });
}

void ShardedModel::end_backward() {
  or_unusable([&] {
    residency_->rethrow();
    residency_->finish_gathers();
    gradients_->finish_backward();
    taken_->stand_in(gradients_->used());
    if (gathered_) residency_->end_pass();
    if (!gradients_->at_boundary()) begin_pass(Pass::kTrain);
  });
}

void ShardedModel::reduce_accumulated() {
  taken_->leave();
  or_unusable([&] {
    gradients_->begin_backward(/*first=*/false, /*boundary=*/true);
    gradients_->finish_backward();
    if (gathered_) residency_->drop_pass();  // nothing was used in it
  });
}

GradientSummary ShardedModel::summarize_gradients(const RankFlags& mine) {
  taken_->leave();
  return or_unusable([&] {
    GradientSummary summary = summarize(*layout_, units_, *gradients_, *comm_, mine);
    if (!summary.late_units.empty()) {
      gradients_->reduce_late(summary.late_units);
      const GradientSummary before = std::move(summary);
      summary = summarize(*layout_, units_, *gradients_, *comm_, {});
      summary.late_units = before.late_units;
      summary.flag_raised = before.flag_raised;
      summary.is_same_step = before.is_same_step;
    }
    used_ = summary.used;
    return summary;
  });
}

/// Marks the parameters as incomplete if `function` throws, unless an optimizer on whole parameters has
/// thrown before any of them was given its new values.
template <class Function>
void ShardedModel::update_parameters(const Function& function) {
  try {
    function();
  } catch (...) {
    const WholeParameters* const whole = optimizer_->whole();
    if (whole == nullptr || !whole->was_refused()) parameters_incomplete_ = true;
    throw;
  }
}

void ShardedModel::update(double grad_scale) {
  try {
    update_parameters([&] {
      optimizer_->begin_step(*gradients_, grad_scale, used_, residency_->order_of_first_use());
      if (!options_.tiers.any_below_device()) optimizer_->finish_step();
    });
  } catch (const Error&) {
    // What operators that run from now on are told.
    residency_->keep_failure(std::current_exception(), /*thrown=*/true);
    throw;
  } catch (const std::exception& error) {
    failure_ = std::make_exception_ptr(
        Error("an earlier step() failed and left parameters or optimizer states incomplete: ",
              first_line(error.what())));
    residency_->keep_failure(failure_, /*thrown=*/true);
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
  residency_->refuse_held("step()");
  or_unusable([&] {
    give_new_values([&] {
      begin_step();
      update(grad_scale);
      gradients_->done_reading();
    });
    used_.clear();
  });
}

/// Collective. Calls `function` when no pass is under way and nobody reads parameters; then a pass begins.
template <class Function>
void ShardedModel::give_new_values(const Function& function) {
  if (gathered_) {
    residency_->drop_pass();  // train() after an evaluation between backward() and step() has begun one
    residency_->begin_update();
  }
  function();
  follow_update();
  if (training_) begin_pass(Pass::kTrain);
}

/// Collective. Parameters were written by the engine, and are gathered anew.
void ShardedModel::follow_update() {
  const bool any = optimizer_->whole() != nullptr;  // may update what has no gradient
  for (int parameter = 0; parameter < layout_->num_parameters(); ++parameter)
    if (any ? layout_->parameters()[parameter].trainable : used_[parameter])
      versions_->written_by_engine(parameter);
  if (gathered_) residency_->parameters_updated();
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
    if (training_) begin_pass(Pass::kTrain);
  });
}

void ShardedModel::apply_to_whole(const std::function<void()>& function) {
  comm::on_all_ranks<Error>(*comm_, "engine before train() or eval() of the optimizer",
                            [&] { check_usable(); });
  residency_->refuse_held("train() or eval() of the optimizer");
  TESSERA_CHECK(optimizer_->whole() != nullptr);
  const PauseListening our_own_operators;
  or_unusable([&] {
    finish_updates();
    give_new_values([&] { update_parameters([&] { optimizer_->whole()->apply(function); }); });
  });
}

// ----------------------------------------------------------------------- a step that fails or is dropped

/// Whether a backward() of the caller's has begun, and ended without end_backward(): no autograd is running.
bool ShardedModel::backward_was_left() const {
  return order_->reductions.in_backward() && torch::autograd::get_current_graph_task_id() == -1;
}

void ShardedModel::check_usable(bool replaces_parameters) {
  if (failure_) std::rethrow_exception(failure_);
  if (backward_was_left())
    throw Error(
        "an earlier loss.backward() failed half-way, and its gradients are incomplete: call zero_grad() on "
        "all "
        "ranks to drop them, or load_checkpoint()");
  residency_->rethrow();
  versions_->check(replaces_parameters);
}

void ShardedModel::check_replaceable(bool parameters, bool states) {
  if (offload_store_ && residency_->has_failure()) parameters_incomplete_ = true;
  if (parameters_incomplete_ && !(parameters && states)) check_usable(parameters);
  versions_->check(parameters);
}

bool ShardedModel::has_failed() const { return failure_ || residency_->has_failure() || backward_was_left(); }

void ShardedModel::drop_gradients() {
  leave_step(/*parameters_too=*/false);
  if (training_) begin_pass(Pass::kTrain);
}

// Ranks may have come to different places of the step: one may wait for what the others have not issued. So
// all of them issue what is left of it, and drop what comes out.
void ShardedModel::leave_step(bool parameters_too) {
  struct State {
    bool in_backward, at_boundary, parameters_incomplete;
  };
  const bool refused = optimizer_->whole() != nullptr && optimizer_->whole()->take_refusal();
  if (offload_store_ && residency_->has_failure() && !refused) parameters_incomplete_ = true;
  const State mine{order_->reductions.in_backward(), gradients_->at_boundary(), parameters_incomplete_};
  State any = mine;
  for (const State& theirs : comm_->exchange(mine, "a step is dropped")) {
    if (theirs.in_backward && !any.in_backward) any.at_boundary = theirs.at_boundary;
    any.in_backward |= theirs.in_backward;
    any.parameters_incomplete |= theirs.parameters_incomplete;
  }
  if (any.parameters_incomplete && !parameters_too) {
    check_usable();
    throw Error("another rank's update failed and left its parameters incomplete: load a checkpoint");
  }
  if (any.parameters_incomplete) {
    optimizer_->drop_step();
  } else {
    if (refused) optimizer_->drop_step();
    finish_updates();
  }
  if (any.in_backward) {
    if (!mine.in_backward) gradients_->begin_backward(/*first=*/true, any.at_boundary);
    residency_->finish_gathers();
    gradients_->drop_backward();
  }
  gradients_->drop();
  free_gradients();
  used_.clear();
  residency_->forget_failure();
  if (refused) follow_update();  // they have the values of before
  failure_ = nullptr;
}

void ShardedModel::begin_replacing(std::string_view call) {
  residency_->refuse_held(call, /*frozen_too=*/true);
  leave_step(/*parameters_too=*/true);
  failure_ =
      std::make_exception_ptr(Error(call, " failed half-way, and the parameters are neither old nor new"));
  parameters_incomplete_ = true;
  residency_->wait_all();
  if (options_.transfer) options_.transfer->synchronize();  // copies read what is replaced
}

void ShardedModel::end_replacing() {
  const OurOwnWork scope;
  for (ParamUnit& unit : units_) {
    if (!unit.has_own_master()) continue;
    const InMemory weights(unit, kUpdated, InMemory::Access::kReadWrite);
    at::Tensor(unit.values()).copy_(unit.master);
  }
  for (int parameter = 0; parameter < layout_->num_parameters(); ++parameter)
    versions_->written_by_engine(parameter);
  if (gathered_) residency_->parameters_updated(/*frozen_too=*/true);
  if (training_) begin_pass(Pass::kTrain);
  failure_ = nullptr;
  parameters_incomplete_ = false;
}

// ----------------------------------------------------------- what lies in grad() between backward passes

void ShardedModel::drop_gradients_of_untrained() {
  for (int parameter = 0; parameter < layout_->num_parameters(); ++parameter) {
    const at::Tensor& tensor = parameters_[parameter];
    if (layout_->parameters()[parameter].trainable || !tensor.requires_grad()) continue;
    untrained_.push_back(tensor);
    tensor.mutable_grad().reset();
    GradientHook::install(this, tensor, [&tensor] { tensor.mutable_grad().reset(); });
  }
}

void ShardedModel::check_gradients() {
  taken_->leave();
  for (const at::Tensor& parameter : untrained_)  // where a hook of the user's has replaced ours
    parameter.mutable_grad().reset();
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (!parameters_[parameter].grad().defined()) continue;
    if (!layout_->parameters()[parameter].trainable)
      throw Error("parameter ", layout_->parameters()[parameter].name,
                  " was frozen at initialize() and has a gradient now: leave it trainable there, and freeze "
                  "it afterwards until it is to be trained");
    throw Error(
        "parameter ", layout_->parameters()[parameter].name,
        " has a gradient that did not come from a backward() of its engine; if it is of another engine's "
        "loss, or was meant for something else, call zero_grad() of this engine first. One loss that is to "
        "train several models is loss.backward()");
  }
}

void ShardedModel::free_gradients() {
  taken_->forget();
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

// ------------------------------------------------------------------------------------- the whole model

int ShardedModel::find(const std::string& name) const {
  const int parameter = layout_->find(name);
  if (parameter < 0) throw Error("the model has no parameter named ", name);
  return parameter;
}

at::Tensor ShardedModel::full_parameter(const std::string& name) {
  const int parameter = find(name);
  at::Tensor copy;
  with_full_unit(layout_->slice(parameter).unit, {},
                 [&](const at::Tensor& full) { copy = cut_out(*layout_, parameter, full); });
  return copy;
}

void ShardedModel::with_full_unit(int index, const at::Tensor& room,
                                  const std::function<void(const at::Tensor&)>& use) {
  finish_updates();
  residency_->wait_all();
  ParamUnit& unit = units_.at(static_cast<size_t>(index));
  const InMemory weights(unit, kUpdated, InMemory::Access::kRead);
  const at::Tensor mine = unit.state_to_gather().weights;
  const OurOwnWork scope;
  const at::Tensor typed = room.defined()
                               ? room.narrow(0, 0, room.numel() / mine.element_size() * mine.element_size())
                                     .view(mine.scalar_type())
                               : room;
  use(gather_owned(unit, mine, *comm_, "parameters", typed));
}

int64_t ShardedModel::room_for_units(const std::vector<int>& units) const {
  int64_t most = 0;
  for (const int index : units) {
    const ParamUnit& unit = units_.at(static_cast<size_t>(index));
    most = std::max(
        most, room_for(unit, *comm_) * std::max(size_bytes(unit.spec.dtype), size_bytes(DType::kFloat32)));
  }
  return most;
}

at::Tensor ShardedModel::full_gradient(const std::string& name) {
  const int parameter = find(name);
  ParamUnit& unit = units_[layout_->slice(parameter).unit];
  if (!unit.spec.trainable) throw Error("parameter ", name, " is frozen and has no gradient");
  const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
  const OurOwnWork scope;
  return cut_out(*layout_, parameter, gather_owned(unit, gradients_->mean_so_far(unit), *comm_, "gradient"));
}

void ShardedModel::set_full_gradient(const std::string& name, const at::Tensor& value) {
  const int parameter = find(name);
  if (!layout_->parameters()[parameter].trainable)
    throw Error("parameter ", name, " is frozen and has no gradient");
  gradients_->set(parameter, value);
}

void ShardedModel::set_full_parameter(const std::string& name, const at::Tensor& value) {
  const int parameter = find(name);
  const UnitSlice& slice = layout_->slice(parameter);
  ParamUnit& unit = units_[slice.unit];
  pin({slice.unit}, /*writable=*/true);
  {
    const OurOwnWork scope;
    unit.memory.full().narrow(0, slice.offset, slice.numel).copy_(value.reshape(-1));
    torch::autograd::impl::bump_version(parameters_[parameter]);
  }
  unpin({slice.unit}, /*modifier_rank=*/0);
  if (!unit.has_own_master()) return;
  const OurOwnWork scope;
  const InMemory weights(unit, kUpdated, InMemory::Access::kReadWrite);
  copy_part(unit.master, unit.local_range(), slice, value);
}

void ShardedModel::pin(const std::vector<int>& units, bool writable) {
  finish_updates();
  residency_->pin(units, writable);
}

void ShardedModel::unpin(const std::vector<int>& units, int modifier_rank) {
  const OurOwnWork scope;
  residency_->align("end of GatheredParameters");
  const bool written = modifier_rank >= 0;
  if (written && options_.transfer) options_.transfer->synchronize();  // copies read what is written here
  if (written) allow_writes(units);
  for (int index : written ? units : std::vector<int>()) {
    ParamUnit& unit = units_[index];
    const at::Tensor& full = unit.memory.full();
    if (comm_->size() > 1) comm_->broadcast(full, modifier_rank, unit.name)->wait();
    const InMemory weights(unit, kUpdated, InMemory::Access::kReadWrite);
    if (unit.placement.sharded())  // what was written lies in another memory than the shard
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

void ShardedModel::abandon(const std::vector<int>& units, bool writable) {
  const PauseListening our_own_operators;
  residency_->unpin(units, writable);
  if (!writable) return;
  for (const int unit : units)
    for (const int parameter : units_[unit].spec.parameters) versions_->leave(parameter);
}

/// Collective. What a rank has written changes on all of them: a graph that has saved it is stale everywhere.
void ShardedModel::allow_writes(const std::vector<int>& units) {
  std::vector<int> parameters;
  for (const int unit : units)
    parameters.insert(parameters.end(), units_[unit].spec.parameters.begin(),
                      units_[unit].spec.parameters.end());
  std::vector<char> mine;
  for (const int parameter : parameters) mine.push_back(versions_->was_written(parameter) ? 1 : 0);
  const std::vector<std::vector<char>> by_rank = comm_->exchange(mine, "written in GatheredParameters");
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool elsewhere = std::ranges::any_of(by_rank, [&](const auto& theirs) { return theirs[i] != 0; });
    if (elsewhere && mine[i] == 0)
      versions_->written_by_engine(parameters[i]);
    else
      versions_->allow(parameters[i]);
  }
}

std::vector<std::vector<at::Tensor>> ShardedModel::full_states(int index) {
  finish_updates();
  residency_->wait_all();
  ParamUnit& unit = units_.at(index);
  std::vector<std::vector<at::Tensor>> states(unit.spec.parameters.size());
  if (!unit.spec.trainable) return states;
  const OurOwnWork scope;
  const InMemory kept(unit, kUpdated, InMemory::Access::kRead);
  const LocalState mine = unit.state_to_gather();
  for (size_t state = 0; state < optimizer_->state_names().size(); ++state) {
    const at::Tensor full = gather_owned(unit, mine.states[state], *comm_, optimizer_->state_names()[state]);
    for (size_t i = 0; i < states.size(); ++i)
      states[i].push_back(cut_out(*layout_, unit.spec.parameters[i], full));
  }
  return states;
}

void ShardedModel::set_states(const std::string& name, const std::vector<at::Tensor>& states,
                              int64_t num_updates) {
  const int parameter = find(name);
  const UnitSlice& slice = layout_->slice(parameter);
  ParamUnit& unit = units_[slice.unit];
  if (!unit.spec.trainable) throw Error("parameter ", name, " is frozen and has no optimizer state");
  TESSERA_CHECK(states.empty() || states.size() == optimizer_->state_names().size());
  finish_updates();
  const OurOwnWork scope;
  const InMemory kept(unit, kUpdated, InMemory::Access::kReadWrite);
  const at::Tensor zeros = at::zeros({1}).expand({slice.numel});
  for (size_t state = 0; state < unit.states.size(); ++state)
    copy_part(unit.states[state], unit.local_range(), slice, states.empty() ? zeros : states[state]);
  optimizer_->set_steps(parameter, num_updates);
}

// --------------------------------------------------------------------------------- what this rank keeps

std::vector<bool> ShardedModel::owned_parameters() const {
  std::vector<bool> owned;
  if (const WholeParameters* whole = optimizer_->whole())
    for (int i = 0; i < layout_->num_parameters(); ++i) owned.push_back(whole->owns(i));
  return owned;
}

StateBytes ShardedModel::measured_bytes(Tier tier) const {
  StateBytes bytes;
  for (const ParamUnit& unit : units_) bytes += unit.bytes(tier);
  return bytes;
}

StateBytes ShardedModel::formula_bytes(bool async_checkpoints, Tier tier) const {
  StateBytes bytes = model_state_bytes(*layout_, state_model(async_checkpoints), tier);
  if (const WholeParameters* whole = optimizer_->whole(); whole != nullptr && tier == Tier::kDevice)
    bytes.optimizer += whole->optimizer().formula_bytes(optimizer_->groups());
  return bytes;
}

StateModel ShardedModel::state_model(bool async_checkpoints) const {
  return {.sharding = options_.sharding,
          .accumulate_dtype = from_torch(options_.reducer.accumulate_dtype),
          .one_copy_a_host = host_shared(),
          .ranks_a_host = gather_comm_->host_rank().num_ranks,
          .num_states = static_cast<int>(state_names_of(options_.optimizer).size()),
          .async_checkpoints = async_checkpoints && !offload_store_ && options_.device.is_cpu(),
          .tiers = {.parameters = options_.tiers.parameters,
                    .optimizer = options_.tiers.optimizer,
                    .device_memory_is_separate = host_apart_},
          .groups = options_.groups};
}

// The module's buffers are rank 0's on all ranks when they are asked for: [Note: a module's state is read
// when it is used] in module_state.h.

std::vector<NamedTensor> ShardedModel::buffers() const {
  std::vector<NamedTensor> buffers;
  if (state_ != nullptr)
    for (NamedBuffer& buffer : state_->buffers())
      if (buffer.tensor.defined()) buffers.push_back({std::move(buffer.name), std::move(buffer.tensor)});
  return buffers;
}

std::vector<NamedBuffer> ShardedModel::persistent_buffers() const {
  std::vector<NamedBuffer> buffers;
  if (state_ != nullptr) buffers = state_->buffers();
  std::erase_if(buffers, [](const NamedBuffer& buffer) { return !buffer.persistent; });
  return buffers;
}

std::optional<BufferKind> ShardedModel::first_kind(const std::string& buffer) const {
  const auto found = first_kinds_.find(buffer);
  return found == first_kinds_.end() ? std::nullopt : std::optional(found->second);
}

void ShardedModel::adopt_buffers() {
  for (const auto& [name, buffer] : buffers()) {
    at::Tensor tensor = buffer;
    const bool cast = tensor.is_floating_point() && options_.buffer_dtype.has_value();
    const at::ScalarType dtype = cast ? to_torch(*options_.buffer_dtype) : tensor.scalar_type();
    if (dtype != tensor.scalar_type() || options_.device != tensor.device())
      tensor.set_data(tensor.to(options_.device, dtype));
  }
  broadcast_buffers();
  for (const auto& [name, tensor] : buffers()) first_kinds_[name] = kind_of(tensor);
}

void ShardedModel::broadcast_buffers() {
  if (comm_->size() > 1 && state_ != nullptr) zero::broadcast_buffers(buffers(), *comm_, options_.device);
}

}  // namespace tessera::zero
