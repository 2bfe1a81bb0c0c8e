#include "zero/param_unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "comm/torch_dtype.h"
#include "core/check.h"
#include "core/memory_use.h"

namespace tessera::zero {

ParamUnit::ParamUnit(const Layout& layout, int index, Sharding sharding, at::Device device,
                     comm::Communicator& comm)
    : index(index),
      spec(layout.units()[index]),
      name(layout.describe(index)),
      shard_range(layout.shard(index, comm.rank())),
      memory({index, spec.numel, to_torch(spec.dtype), device, name}) {
  const MemoryFor use_of_memory(MemoryUse::kParameters);
  at::Tensor buffer;
  if (sharding.updates_shard(spec.trainable)) buffer = comm.allocate_shared(memory.bytes(), name);
  placement = place(sharding, spec.trainable, /*one_copy_a_host=*/buffer.defined());
  const at::TensorOptions options = memory.full().options();
  if (placement.sharded()) shard = at::empty({shard_range.numel()}, options);
  if (spec.trainable && spec.dtype != DType::kFloat32) {
    const MemoryFor use_of_master(MemoryUse::kMaster);
    master = at::empty({local_range().numel()}, options.dtype(at::kFloat));
  }
  if (!buffer.defined() && !placement.sharded()) buffer = new_buffer();
  if (buffer.defined()) memory.bind(std::move(buffer));
}

at::Tensor ParamUnit::new_buffer() const {
  return at::empty({memory.bytes()}, memory.full().options().dtype(at::kByte));
}

void ParamUnit::move_in(const std::vector<at::Tensor>& tensors, const Layout& layout,
                        comm::Communicator& comm,
                        const std::function<void(int parameter, at::Tensor flat)>& write_value) {
  if (placement.sharded()) {
    const MemoryFor use_of_memory(MemoryUse::kParameters);
    memory.bind(new_buffer());
  }
  const at::Tensor& full = memory.full();
  const bool fp32 = full.scalar_type() == at::kFloat;
  const bool writes = !placement.host_shared() || comm.rank() == 0;

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
  if (comm.size() > 1) comm.broadcast(flat, 0, name)->wait();
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
    shard.copy_(mine);
    memory.release();
    unsharded_ = false;
  } else {
    shard = mine;
  }
  if (!spec.trainable) return;
  if (fp32)
    master = values();
  else
    master.copy_(local(flat));
}

at::Tensor ParamUnit::local(const at::Tensor& flat) const {
  return placement.updates_shard ? flat.narrow(0, shard_range.begin, shard_range.numel()) : flat;
}

LocalState ParamUnit::local_state() const {
  return {local_range(), spec.trainable ? master : values(), states};
}

LocalState ParamUnit::shard_state() const {
  LocalState part = local_state();
  const auto cut = [&](at::Tensor& tensor) {
    tensor = tensor.narrow(0, shard_range.begin - part.range.begin, shard_range.numel());
  };
  cut(part.weights);
  for (at::Tensor& state : part.states) cut(state);
  part.range = shard_range;
  return part;
}

StateBytes ParamUnit::bytes() const {
  StateBytes bytes;
  switch (placement.parameters) {
    case Placement::Parameters::kWhole: bytes.parameters = memory.bytes(); break;
    case Placement::Parameters::kSharded:
      bytes.parameters = static_cast<int64_t>(shard.storage().nbytes());
      break;
    case Placement::Parameters::kHostShared: bytes.parameters = static_cast<int64_t>(shard.nbytes()); break;
  }
  if (gradient.accumulator.defined()) bytes.gradients = static_cast<int64_t>(gradient.accumulator.nbytes());
  if (has_own_master()) bytes.master = static_cast<int64_t>(master.nbytes());
  for (const at::Tensor& state : states) bytes.optimizer += static_cast<int64_t>(state.nbytes());
  return bytes;
}

void ParamUnit::unshard(comm::Communicator& comm) {
  TESSERA_CHECK(!gathering() && memory.has_buffer());
  memory.guard();
  unsharded_ = true;
  gather_ = comm.all_gather(memory.contents(), shard, name);
}

bool ParamUnit::wait_for_unshard() {
  const comm::WorkPtr work = std::exchange(gather_, nullptr);
  if (!work) return false;
  work->wait();
  memory.bind();
  return true;
}

void ParamUnit::reshard(BufferPool& pool) {
  TESSERA_CHECK(!gathering());
  pool.give_back(memory.release());
  unsharded_ = false;
}

void ParamUnit::bind_zeros() {
  gather_ = nullptr;
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte).device(memory.full().device());
  if (!memory.bound()) memory.bind(at::zeros({memory.bytes()}, bytes));
  unsharded_ = true;
}

void ParamUnit::begin_private_writes(BufferPool& pool) {
  if (!placement.host_shared()) return;
  at::Tensor buffer = pool.acquire(memory.bytes());
  std::memcpy(buffer.data_ptr(), memory.full().data_ptr(), static_cast<size_t>(memory.bytes()));
  common_ = memory.release();
  memory.bind(std::move(buffer));
}

void ParamUnit::end_private_writes(BufferPool& pool) {
  if (!common_.defined()) return;
  pool.give_back(memory.release());
  memory.bind(std::exchange(common_, at::Tensor()));
}

}  // namespace tessera::zero
