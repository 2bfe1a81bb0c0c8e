#include "zero/unit/param_unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "comm/torch_dtype.h"
#include "core/check.h"
#include "core/memory/allocation_failure.h"
#include "core/memory/memory_use.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero {

ParamUnit::ParamUnit(const Layout& layout, int index, const UnitOptions& options, comm::Communicator& comm)
    : index(index),
      spec(layout.units()[index]),
      name(layout.describe(index)),
      mesh(options.mesh.value_or(mesh_of({}, comm.size(), comm.rank()))),
      shard_range(mesh.shard_of(spec.numel)),
      owned_range(mesh.owned_of(spec.numel)),
      memory({index, spec.numel, to_torch(spec.dtype), options.device, name}),
      num_sharing_(comm.host_rank().num_ranks),
      store_(options.store),
      transfer_(options.transfer) {
  const MemoryForUnit for_this(name);
  const MemoryFor use_of_memory(MemoryUse::kParameters);
  const auto placed = [&](bool one_copy_a_host) {
    return placement_of(options.sharding, spec.trainable, one_copy_a_host, options.tiers,
                        mesh.secondary_size > 0);
  };
  at::Tensor buffer;
  if (placed(true).host_shared()) buffer = comm.allocate_shared(memory.bytes(), name);
  placement = placed(/*one_copy_a_host=*/buffer.defined());
  if (placement.sharded())
    shard = make(kValues, shard_range.numel(), memory.full().scalar_type(), "the shard");
  if (placement.second_copy)
    secondary = at::empty({mesh.secondary_of(spec.numel).numel()}, memory.full().options());
  if (has_own_master()) {
    const MemoryFor use_of_master(MemoryUse::kMaster);
    master = make(kOptimizer, local_range().numel(), at::kFloat, "the master");
  }
  if (!buffer.defined() && !placement.sharded()) buffer = new_buffer();
  if (buffer.defined()) memory.bind(std::move(buffer));
}

at::Tensor ParamUnit::new_buffer() const {
  return at::empty({memory.bytes()}, memory.full().options().dtype(at::kByte));
}

Tier ParamUnit::tier_of(StateKinds kind) const {
  return kind == kValues ? placement.values : kind == kOptimizer ? placement.optimizer : placement.gradient;
}

at::Tensor ParamUnit::make(StateKinds kind, int64_t numel, at::ScalarType dtype, const std::string& what) {
  const MemoryForUnit for_this(name);
  const Tier tier = tier_of(kind);
  if (tier == Tier::kDevice) return at::zeros({numel}, memory.full().options().dtype(dtype));
  TESSERA_CHECK(placement.device_memory_is_separate == (transfer_ != nullptr));
  if (tier == Tier::kHost) {
    TESSERA_CHECK(transfer_ != nullptr, "the host's memory is the device's");
    return transfer_->host_memory(numel * static_cast<int64_t>(at::elementSize(dtype))).view(dtype);
  }
  TESSERA_CHECK(store_ != nullptr);
  offloaded_.emplace_back(kind,
                          std::make_unique<OffloadedTensor>(*store_, numel, dtype, str(what, " of ", name)));
  return offloaded_.back().second->tensor();
}

std::vector<OffloadedTensor*> ParamUnit::on_disk(StateKinds kinds) const {
  std::vector<OffloadedTensor*> found;
  for (const auto& [kind, tensor] : offloaded_)
    if ((kind & kinds) != 0) found.push_back(tensor.get());
  return found;
}

OffloadedTensor* ParamUnit::find_on_disk(const at::Tensor& tensor) const {
  const auto storage_of = [](const at::Tensor& one) { return one.storage().unsafeGetStorageImpl(); };
  for (const auto& [kind, offloaded] : offloaded_)
    if (storage_of(offloaded->tensor()) == storage_of(tensor)) return offloaded.get();
  return nullptr;
}

// It writes into the unit.
// NOLINTNEXTLINE(readability-make-member-function-const)
void ParamUnit::acquire(StateKinds kinds, OffloadedTensor::Access access) {
  const std::vector<OffloadedTensor*> tensors = on_disk(kinds);
  for (size_t i = 0; i < tensors.size(); ++i) {
    try {
      tensors[i]->acquire(access);
    } catch (...) {
      while (i > 0) tensors[--i]->release();
      throw;
    }
  }
}

// NOLINTNEXTLINE(readability-make-member-function-const)
void ParamUnit::release(StateKinds kinds) {
  for (OffloadedTensor* const tensor : on_disk(kinds)) tensor->release();
}

void ParamUnit::move_in(const std::vector<at::Tensor>& tensors, const Layout& layout,
                        comm::Communicator& comm,
                        const std::function<void(int parameter, at::Tensor flat)>& write_value,
                        const std::function<void(const at::Tensor& flat)>& broadcast) {
  if (placement.sharded()) {
    const MemoryForUnit for_this(name);
    const MemoryFor use_of_memory(MemoryUse::kParameters);
    memory.bind(new_buffer());
  }
  const at::Tensor& full = memory.full();
  const bool fp32 = full.scalar_type() == at::kFloat;
  const bool writes = !placement.host_shared() || comm.host_rank().index == 0;

  // Initial values of trainable parameters travel in fp32, so that masters start from what the model had
  // before the cast.
  const bool cast = spec.trainable && !fp32;
  at::Tensor flat = cast ? at::empty({spec.numel}, full.options().dtype(at::kFloat)) : full;
  if (cast || writes) {
    flat.zero_();
    for (int parameter : spec.parameters) {
      const UnitSlice& slice = layout.slice(parameter);
      write_value(parameter, flat.narrow(0, slice.offset, slice.numel));
    }
  }
  broadcast(flat);
  if (cast && writes) at::Tensor(full).copy_(flat);
  if (cast && placement.host_shared()) comm.barrier(name);

  for (int parameter : spec.parameters) {
    const UnitSlice& slice = layout.slice(parameter);
    at::Tensor tensor = tensors[parameter];
    tensor.set_data(full.narrow(0, slice.offset, slice.numel).view(layout.parameters()[parameter].shape));
  }

  const at::Tensor mine =
      (placement.updates_shard ? memory.contents() : full).narrow(0, shard_range.begin, shard_range.numel());
  if (placement.sharded()) {
    const InMemory in_memory(*this, kValues, InMemory::Access::kOverwrite);
    shard.copy_(mine);
    memory.release();
    unsharded_ = false;
  } else {
    shard = mine;
  }
  if (!spec.trainable) return;
  if (!has_own_master()) {
    master = values();
  } else {
    const InMemory in_memory(*this, kOptimizer, InMemory::Access::kOverwrite);
    master.copy_(cast ? local(flat) : values());
  }
}

at::Tensor ParamUnit::local(const at::Tensor& flat) const {
  return placement.updates_shard ? flat.narrow(0, shard_range.begin, shard_range.numel()) : flat;
}

LocalState ParamUnit::local_state() const {
  return {local_range(), spec.trainable ? master : values(), states};
}

LocalState ParamUnit::owned_state() const {
  LocalState part = local_state();
  const auto cut = [&](at::Tensor& tensor) {
    tensor = tensor.narrow(0, owned_range.begin - part.range.begin, owned_range.numel());
  };
  cut(part.weights);
  for (at::Tensor& state : part.states) cut(state);
  part.range = owned_range;
  return part;
}

StateBytes ParamUnit::bytes(Tier tier) const {
  StateBytes bytes;
  if (placement.values == tier) {
    switch (placement.parameters) {
      case Placement::Parameters::kWhole: bytes.parameters = memory.bytes(); break;
      case Placement::Parameters::kSharded: bytes.parameters = static_cast<int64_t>(shard.nbytes()); break;
      case Placement::Parameters::kHostShared:
        bytes.parameters = (memory.bytes() + num_sharing_ - 1) / num_sharing_;
        break;
    }
  }
  if (secondary.defined() && tier == Tier::kDevice)
    bytes.parameters += static_cast<int64_t>(secondary.nbytes());
  if (gradient.accumulator.defined() && placement.gradient == tier)
    bytes.gradients = static_cast<int64_t>(gradient.accumulator.nbytes());
  if (placement.optimizer != tier) return bytes;
  if (has_own_master()) bytes.master = static_cast<int64_t>(master.nbytes());
  for (const at::Tensor& state : states) bytes.optimizer += static_cast<int64_t>(state.nbytes());
  return bytes;
}

void ParamUnit::follow_values() {
  if (arrival_) transfer_->wait(arrival_);
}

void ParamUnit::wait_for_gradient() const {
  if (gradient.arrival) transfer_->synchronize(gradient.arrival);
}

void ParamUnit::wait_for_copies_up() const {
  if (copied_up_) transfer_->synchronize(copied_up_);
}

/// (shard numel) the values of this rank's shard, in the device's memory once arrival_ has passed. The
/// buffer's last readers were given to the current stream before.
at::Tensor ParamUnit::shard_on_device() {
  if (!placement.on_host(placement.values)) return shard;
  at::Tensor place = memory.contents().narrow(0, shard_range.begin, shard_range.numel());
  arrival_ = copied_up_ = transfer_->h2d(place, shard, transfer_->record());
  return place;
}

/// What reads it has ended, or is ordered behind what may be given to the device.
void ParamUnit::release_shard() {
  if (placement.on_host(placement.values) && is_on_disk(kValues)) transfer_->synchronize(arrival_);
  release(kValues);
}

void ParamUnit::unshard(comm::Communicator& comm, comm::Communicator* secondary_comm) {
  TESSERA_CHECK(!gathering() && memory.has_buffer());
  memory.guard();
  unsharded_ = true;
  has_values_ = false;
  if (secondary_current_) {
    gather_ = secondary_comm->all_gather(memory.contents(), secondary, name);
    return;
  }
  acquire(kValues, OffloadedTensor::Access::kRead);  // until the gather has arrived
  try {
    const at::Tensor mine = shard_on_device();
    const auto issue = [&] { gather_ = comm.all_gather(memory.contents(), mine, name); };
    if (arrival_) {
      arrival_ = transfer_->issue_after(arrival_, issue);
    } else {
      issue();
    }
  } catch (...) {
    release_shard();
    throw;
  }
}

bool ParamUnit::wait_for_unshard() {
  const comm::WorkPtr work = std::exchange(gather_, nullptr);
  if (!work) return false;
  try {
    work->wait();
  } catch (...) {
    release_shard();
    throw;
  }
  follow_values();  // also where no collective was
  release_shard();
  arrival_ = nullptr;
  memory.bind();
  has_values_ = true;
  keep_second_copy();
  return true;
}

/// What has been gathered is kept in part, for the gathers that follow. The model reads nothing here.
void ParamUnit::keep_second_copy() {
  if (!placement.second_copy || std::exchange(secondary_current_, true)) return;
  const OurOwnWork scope;
  const Range part = mesh.secondary_of(spec.numel);
  secondary.copy_(memory.full().narrow(0, part.begin, part.numel()));
}

void ParamUnit::reshard(BufferPool& pool) {
  TESSERA_CHECK(!gathering());
  pool.give_back({memory.release()});
  unsharded_ = false;
}

bool ParamUnit::readable_again() {
  TESSERA_CHECK(!gathering());
  if (!unsharded_ || memory.bound()) return true;
  if (has_values_) memory.bind();
  return has_values_;
}

at::Tensor gather_owned(const ParamUnit& unit, const at::Tensor& mine, comm::Communicator& comm,
                        std::string_view what, const at::Tensor& room) {
  at::Tensor full = mine.to(unit.memory.full().device());  // from the host, where it lies there
  if (mine.numel() == unit.spec.numel) return full;
  const at::Tensor part = std::exchange(full, room.defined() ? room.narrow(0, 0, unit.spec.numel)
                                                             : at::empty({unit.spec.numel}, full.options()));
  comm.all_gather(full, part, str(what, " of ", unit.name))->wait();
  const int64_t copies = unit.mesh.num_replicas();
  if (copies == 1) return full;
  // This changes the order of ranks into that of owned parts.
  const at::Tensor by_rank = full.view({copies, unit.mesh.shard_size, part.numel()}).transpose(0, 1);
  if (!room.defined()) return by_rank.reshape(-1);
  const at::Tensor ordered = room.narrow(0, unit.spec.numel, unit.spec.numel);
  ordered.view(by_rank.sizes()).copy_(by_rank);
  return ordered;
}

int64_t room_for(const ParamUnit& unit, const comm::Communicator& comm) {
  if (!unit.placement.updates_shard || comm.size() == 1) return 0;
  return unit.spec.numel * (unit.mesh.num_replicas() == 1 ? 1 : 2);
}

at::Tensor join_owned(const ParamUnit& unit, const Layout& layout, std::vector<OwnedParameter>& owned,
                      at::ScalarType dtype, comm::Communicator& comm, std::string_view what) {
  at::Tensor full = at::zeros({unit.spec.numel}, unit.memory.full().options().dtype(dtype));
  for (OwnedParameter& one : owned) {
    const UnitSlice& slice = layout.slice(one.parameter);
    if (slice.unit != unit.index) continue;
    full.narrow(0, slice.offset, slice.numel).copy_(one.values.reshape(-1));
    one.values.reset();
  }
  if (comm.size() == 1) return full;
  const at::Tensor bits = full.view(at::kInt);  // a unit's elements fill whole integers
  const std::string name = str(what, " of ", unit.name);
  if (unit.placement.updates_shard && unit.mesh.num_replicas() == 1)
    comm.reduce_scatter(bits, name)->wait();
  else
    comm.all_reduce(bits, name)->wait();
  return full;
}

void copy_part(const at::Tensor& held, Range range, const UnitSlice& slice, const at::Tensor& value) {
  const Range part = intersect(slice.range(), range);
  if (part.numel() > 0)
    held.narrow(0, part.begin - range.begin, part.numel())
        .copy_(value.reshape(-1).narrow(0, part.begin - slice.offset, part.numel()));
}

at::Tensor cut_out(const Layout& layout, int parameter, const at::Tensor& full) {
  const UnitSlice& slice = layout.slice(parameter);
  const at::ScalarType dtype =
      is_compute_type(from_torch(full.scalar_type())) ? at::kFloat : full.scalar_type();
  return full.narrow(0, slice.offset, slice.numel)
      .to(dtype, /*non_blocking=*/false, /*copy=*/true)
      .view(layout.parameters()[parameter].shape);
}

at::Device device_of(const std::vector<ParamUnit>& units) {
  return units.empty() ? at::Device(at::kCPU) : units.front().memory.full().device();
}

bool any_sharded(const std::vector<ParamUnit>& units) {
  return std::ranges::any_of(units, [](const ParamUnit& unit) { return unit.placement.sharded(); });
}

bool any_updates_shard(const std::vector<ParamUnit>& units) {
  return std::ranges::any_of(units, [](const ParamUnit& unit) { return unit.placement.updates_shard; });
}

void ParamUnit::begin_private_writes(BufferPool& pool) {
  if (!placement.host_shared()) return;
  const MemoryForUnit for_this(name);
  at::Tensor buffer = pool.acquire(memory.bytes()).memory;
  std::memcpy(buffer.data_ptr(), memory.full().data_ptr(), static_cast<size_t>(memory.bytes()));
  common_ = memory.release();
  memory.bind(std::move(buffer));
}

void ParamUnit::publish_private_writes(const comm::HostRank& place) {
  if (!common_.defined()) return;
  const int64_t bytes = memory.bytes(), part = (bytes + place.num_ranks - 1) / place.num_ranks;
  const int64_t begin = std::min(bytes, place.index * part), length = std::min(part, bytes - begin);
  std::memcpy(static_cast<char*>(common_.data_ptr()) + begin,
              static_cast<const char*>(memory.full().const_data_ptr()) + begin, static_cast<size_t>(length));
}

void ParamUnit::end_private_writes(BufferPool& pool) {
  if (!common_.defined()) return;
  pool.give_back({memory.release()});
  memory.bind(std::exchange(common_, at::Tensor()));
}

}  // namespace tessera::zero
