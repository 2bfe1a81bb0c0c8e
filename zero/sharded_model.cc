#include "zero/sharded_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include <exception>

#include "core/error.h"
#include "core/memory_use.h"
#include "zero/torch_dtype.h"

namespace tessera::zero {

ShardedModel::ShardedModel(const ModelView& model, comm::CommunicatorPtr comm,
                           const ShardedModelOptions& options)
    : options_(options), comm_(std::move(comm)) {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  ParameterList list = list_parameters(model, options_.compute_dtype);
  if (list.specs.empty()) throw ConfigError("the model has no parameters");
  if (options_.group_of)
    for (ParameterSpec& spec : list.specs) spec.group = options_.group_of(spec.name);
  layout_ = std::make_unique<Layout>(list.specs, LayoutOptions{comm_->size(), options_.unit_numel});
  check_same_model_everywhere();
  refuse_forks(model, options_.sharding);
  // TorchScript's fuser hands raw pointers to compiled kernels, which no
  // listener hears of. (A switch of the process.)
  if (model.scripted && options_.sharding.optimizer) torch::jit::setTensorExprFuserEnabled(false);
  parameters_ = list.tensors;
  gather_comm_ = comm_->duplicate("gather");
  move_into_units(list.tensors);
  adopt_buffers(model);

  options_.residency.shared = shared_;
  options_.residency.sharded = options_.sharding.parameters && !any_shared();
  options_.residency.track_casts = options_.track_casts;
  residency_ =
      std::make_unique<Residency>(*layout_, units_, shards_, gather_comm_, comm_, options_.residency);
  options_.reducer.sharding = options_.sharding;
  options_.reducer.sharding.parameters = options_.residency.sharded;  // whether a rank may stand in a gather
  const bool one_order = !gather_comm_->wait_blocks();  // [Note: one order on a device] in residency.h
  gradients_ = std::make_unique<GradientReducer>(
      *layout_, parameters_, one_order ? gather_comm_ : comm_->duplicate("reduce"), options_.reducer);
  if (one_order && options_.residency.sharded) {
    residency_->share_order_with({.under_way = [this] { return gradients_->under_way(); },
                                  .num_ready = [this] { return gradients_->num_ready(); },
                                  .num_issued = [this] { return gradients_->num_issued(); },
                                  .issue_until = [this](int count) { gradients_->issue_until(count); }});
    gradients_->issued_from_outside = [this] { return residency_->follows_recorded_order(); };
  }
  gradients_->check = [this] { residency_->rethrow(); };
  gradients_->before_waiting = [this] { residency_->finish_gathers(); };
  std::vector<at::Tensor> values;
  for (int unit = 0; unit < layout_->num_units(); ++unit)
    values.push_back(options_.sharding.optimizer ? shards_[unit] : units_[unit].full());
  optimizer_ = std::make_unique<ShardedOptimizer>(
      *layout_, std::move(values), masters_, comm_,
      ShardedOptimizer::Options{options_.sharding, options_.optimizer, options_.groups});
  if (options_.sharding.optimizer) listener_.emplace(options_.track_casts);
  versions_.resize(parameters_.size());
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) note_version(parameter);
}

// The model may be read once its engine is gone (unless its parameters are sharded), and then
// nobody waits for the last updates any more.
ShardedModel::~ShardedModel() {
  if (!residency_ || residency_->sharded() || std::uncaught_exceptions() > 0) return;
  try {
    residency_->wait_all();
  } catch (const std::exception&) {
    // Whoever else failed says so itself.
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

at::Tensor ShardedModel::region(int unit, const at::Tensor& flat) const {
  if (!options_.sharding.optimizer) return flat;
  const Range mine = layout_->shard(unit, comm_->rank());
  return flat.narrow(0, mine.begin, mine.numel());
}

void ShardedModel::move_into_units(const std::vector<at::Tensor>& tensors) {
  shards_.resize(layout_->num_units());
  masters_.resize(layout_->num_units());
  units_.reserve(layout_->num_units());
  for (int unit = 0; unit < layout_->num_units(); ++unit) move_unit(unit, tensors);
}

at::Tensor ShardedModel::allocate_unit(int unit) {
  const int64_t bytes = units_[unit].bytes();
  const MemoryFor use(MemoryUse::kParameters);
  at::Tensor memory;
  if (sharded(unit)) memory = gather_comm_->allocate_shared(bytes, layout_->describe(unit));
  shared_.push_back(memory.defined());
  return memory.defined() ? memory
                          : at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(options_.device));
}

// Unit by unit, so that never more than one unit exists twice.
void ShardedModel::move_unit(int unit, const std::vector<at::Tensor>& tensors) {
  const Unit& spec = layout_->units()[unit];
  const at::ScalarType dtype = to_torch(spec.dtype);
  units_.emplace_back(UnitMemory::Options{unit, spec.numel, dtype, options_.device, layout_->describe(unit)});
  UnitMemory& memory = units_.back();
  const at::Tensor buffer = allocate_unit(unit);
  memory.bind(buffer);
  const at::Tensor& full = memory.full();
  const bool shared = shared_[unit];
  const bool writes = !shared || comm_->rank() == 0;

  // Initial values of trainable parameters travel in fp32, so that masters start
  // from what the model had before the cast.
  const bool cast = spec.trainable && dtype != at::kFloat;
  at::Tensor flat = cast ? at::empty({spec.numel}, full.options().dtype(at::kFloat)) : full;
  if (cast || writes) {
    flat.zero_();
    for (int parameter : spec.parameters) {
      const zero::Slot& slot = layout_->slot(parameter);
      flat.narrow(0, slot.offset, slot.numel).copy_(tensors[parameter].reshape(-1));
    }
  }
  if (comm_->size() > 1) gather_comm_->broadcast(flat, 0, layout_->describe(unit))->wait();
  if (cast && writes) at::Tensor(full).copy_(flat);
  if (cast && shared) gather_comm_->barrier(layout_->describe(unit));

  for (int parameter : spec.parameters) {
    const zero::Slot& slot = layout_->slot(parameter);
    at::Tensor tensor = tensors[parameter];
    tensor.set_data(full.narrow(0, slot.offset, slot.numel).view(layout_->parameters()[parameter].shape));
  }
  const Range mine = layout_->shard(unit, comm_->rank());
  shards_[unit] =
      (options_.sharding.optimizer ? memory.contents() : full).narrow(0, mine.begin, mine.numel());
  if (options_.sharding.parameters && !shared) {
    const MemoryFor use(MemoryUse::kParameters);
    shards_[unit] = shards_[unit].clone();
    memory.release();
  }
  if (!spec.trainable) return;
  if (dtype == at::kFloat) {
    masters_[unit] = options_.sharding.optimizer ? shards_[unit] : full;
  } else {
    const MemoryFor use(MemoryUse::kMaster);
    masters_[unit] = region(unit, flat).clone();
  }
}

void ShardedModel::adopt_buffers(const ModelView& model) {
  for (const NamedTensor& buffer : model.buffers) {
    at::Tensor tensor = buffer.tensor;
    const bool cast = tensor.is_floating_point() && options_.compute_dtype != DType::kFloat32;
    const at::ScalarType dtype = cast ? to_torch(options_.compute_dtype) : tensor.scalar_type();
    if (dtype != tensor.scalar_type() || options_.device != tensor.device())
      tensor.set_data(tensor.to(options_.device, dtype));
    buffers_.push_back({buffer.name, tensor});
  }
  broadcast_buffers();
}

void ShardedModel::broadcast_buffers() {
  if (comm_->size() == 1) return;
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  for (NamedTensor& buffer : buffers_) {
    const at::Tensor flat = buffer.tensor.reshape(-1).contiguous();
    if (flat.numel() == 0) continue;
    comm_->broadcast(flat.view(at::kByte), 0, "buffers")->wait();  // of any dtype
    buffer.tensor.copy_(flat.view(buffer.tensor.sizes()));
  }
}

void ShardedModel::update(double grad_scale, const std::vector<bool>& used) {
  const Unheard our_own_operators;
  if (options_.sharding.optimizer) residency_->begin_update();
  optimizer_->step(*gradients_, grad_scale, used);
  gradients_->done_reading();
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (!used[parameter]) continue;
    torch::autograd::impl::bump_version(parameters_[parameter]);
    note_version(parameter);
  }
  if (options_.sharding.optimizer) residency_->parameters_updated();
}

static uint32_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& counter = torch::autograd::impl::version_counter(tensor);
  return counter.enabled() ? counter.current_version() : 0;
}

void ShardedModel::note_version(size_t parameter) {
  versions_[parameter] = version_of(parameters_[parameter]);
}

void ShardedModel::check_parameters() const {
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const at::Tensor& tensor = parameters_[parameter];
    const ParameterSpec& spec = layout_->parameters()[parameter];
    const int unit = layout_->slot(static_cast<int>(parameter)).unit;
    if (!tensor.is_alias_of(units_[unit].full())) {
      const at::ScalarType before = to_torch(spec.dtype), now = tensor.scalar_type();
      throw Error(
          str("parameter ", spec.name,
              " is not in the engine's memory any more: model->to(), set_data() or torch::load() has "
              "replaced its memory",
              before == now ? "" : str(", of ", c10::toString(before), ", by one of ", c10::toString(now)),
              ", and it would not be trained. Choose dtype (by the config) and device before initialize(); "
              "give values with "
              "load_weights(), or inside a GatheredParameters with modifier_rank set"));
    }
    if (version_of(tensor) != versions_[parameter] && !residency_->writable(unit))
      throw Error(str("parameter ", spec.name,
                      " was written in place outside of a GatheredParameters: the values would be lost, or "
                      "differ between ranks. Write inside a GatheredParameters with modifier_rank set, or "
                      "give values with "
                      "load_weights()"));
  }
}

int ShardedModel::find(const std::string& name) const {
  const int parameter = layout_->find(name);
  if (parameter < 0) throw Error(str("the model has no parameter named ", name));
  return parameter;
}

/// `mine`: (unit numel) if `whole`, else this rank's shard of the parameter's unit.
/// Returns an fp32 copy of the parameter.
at::Tensor ShardedModel::gather_parameter(int parameter, const at::Tensor& mine, bool whole,
                                          std::string_view what) {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  const zero::Slot& slot = layout_->slot(parameter);
  at::Tensor full = mine;
  if (!whole) {
    full = at::empty({layout_->units()[slot.unit].numel}, mine.options());
    comm_->all_gather(full, mine, str(what, " of ", layout_->describe(slot.unit)))->wait();
  }
  return full.narrow(0, slot.offset, slot.numel)
      .to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)
      .view(layout_->parameters()[parameter].shape);
}

at::Tensor ShardedModel::full_parameter(const std::string& name) {
  const int parameter = find(name);
  const int unit = layout_->slot(parameter).unit;
  residency_->wait_all();
  const bool trainable = layout_->units()[unit].trainable;
  const bool whole = !sharded(unit);
  const at::Tensor& mine = trainable ? masters_[unit] : whole ? units_[unit].full() : shards_[unit];
  return gather_parameter(parameter, mine, whole, "parameters");
}

at::Tensor ShardedModel::full_gradient(const std::string& name) {
  const int parameter = find(name);
  const int unit = layout_->slot(parameter).unit;
  if (!layout_->units()[unit].trainable)
    throw Error(str("parameter ", name, " is frozen and has no gradient"));
  if (!options_.sharding.optimizer && !gradients_->reads_peers())
    return gather_parameter(parameter, gradients_->accumulator(unit), true, "gradient");
  return gather_parameter(parameter, gradients_->shard(unit), false, "gradient");
}

void ShardedModel::unpin(const std::vector<int>& units, int modifier_rank) {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  residency_->align("end of GatheredParameters");
  if (modifier_rank >= 0) {
    for (int unit : units) {
      for (int parameter : layout_->units()[unit].parameters) note_version(parameter);
      const at::Tensor& full = units_[unit].full();
      if (comm_->size() > 1) comm_->broadcast(full, modifier_rank, layout_->describe(unit))->wait();
      const Range mine = layout_->shard(unit, comm_->rank());
      if (options_.sharding.parameters || shared_[unit])
        shards_[unit].copy_(full.narrow(0, mine.begin, mine.numel()));
      at::Tensor& master = masters_[unit];
      if (!master.defined() || full.scalar_type() == at::kFloat) continue;
      // Keep the fp32 digits of what was not written.
      const at::Tensor value = region(unit, full);
      master.copy_(at::where(master.to(value.scalar_type()) == value, master, value.to(at::kFloat)));
    }
  }
  if (modifier_rank >= 0 && any_shared()) gather_comm_->barrier("end of GatheredParameters");
  residency_->unpin(units, /*writable=*/modifier_rank >= 0);
}

ShardedModel::Held ShardedModel::held(int unit) const {
  const bool trainable = layout_->units()[unit].trainable;
  Held held;
  held.range = sharded(unit) ? layout_->shard(unit, comm_->rank()) : Range{0, layout_->units()[unit].numel};
  held.weights = trainable ? masters_[unit] : sharded(unit) ? shards_[unit] : units_[unit].full();
  for (size_t i = 0; trainable && i < optimizer_->state_names().size(); ++i)
    held.states.push_back(optimizer_->state(unit, static_cast<int>(i)));
  return held;
}

ShardedModel::Held ShardedModel::shard_of(int unit) const {
  Held part = held(unit);
  const Range mine = layout_->shard(unit, comm_->rank());
  const auto cut = [&](at::Tensor& tensor) {
    tensor = tensor.narrow(0, mine.begin - part.range.begin, mine.numel());
  };
  cut(part.weights);
  for (at::Tensor& state : part.states) cut(state);
  part.range = mine;
  return part;
}

void ShardedModel::begin_replacing() {
  drop_pass();
  residency_->wait_all();
}

void ShardedModel::end_replacing() {
  const Unheard our_own_operators;
  const at::NoGradGuard no_grad;
  for (int unit = 0; unit < layout_->num_units(); ++unit) {
    if (!layout_->units()[unit].trainable || layout_->units()[unit].dtype == DType::kFloat32) continue;
    at::Tensor value = options_.sharding.optimizer ? shards_[unit] : units_[unit].full();
    value.copy_(masters_[unit]);
  }
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    torch::autograd::impl::bump_version(parameters_[parameter]);
    note_version(parameter);
  }
  if (options_.sharding.optimizer) residency_->parameters_updated(/*frozen_too=*/true);
}

StateBytes ShardedModel::measured_bytes() const {
  StateBytes bytes;
  for (size_t unit = 0; unit < units_.size(); ++unit)
    bytes.parameters += shared_[unit] ? static_cast<int64_t>(shards_[unit].nbytes())
                        : options_.sharding.parameters
                            ? static_cast<int64_t>(shards_[unit].storage().nbytes())
                            : units_[unit].bytes();
  bytes.gradients = gradients_->accumulator_bytes();
  bytes.master = optimizer_->master_bytes();
  bytes.optimizer = optimizer_->state_bytes();
  return bytes;
}

StateBytes ShardedModel::formula_bytes(bool async_checkpoints) const {
  return model_state_bytes(*layout_, {.sharding = options_.sharding,
                                      .accumulate_dtype = from_torch(options_.reducer.accumulate_dtype),
                                      .one_copy_a_host = any_shared(),
                                      .num_states = static_cast<int>(optimizer_->state_names().size()),
                                      .async_checkpoints = async_checkpoints});
}

}  // namespace tessera::zero
