#include "comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "comm/memory/cpu_allocator.h"
#include "comm/torch_dtype.h"
#include "comm/transport.h"
#include "core/check.h"

namespace tessera::comm {
namespace {

void check_buffer(const at::Tensor& buffer, std::string_view label) {
  TESSERA_CHECK(buffer.defined(), label);
  TESSERA_CHECK(buffer.dim() == 1 && buffer.is_contiguous(), label, " has shape ", buffer.sizes());
}

bool can_be_summed(const at::Tensor& buffer) {
  const auto dtype = find_dtype(buffer.scalar_type());
  return dtype && *dtype <= DType::kBool;
}

void check_summed(const at::Tensor& buffer, std::string_view label) {
  check_buffer(buffer, label);
  TESSERA_CHECK(can_be_summed(buffer), label, " is ", buffer.scalar_type());
}

/// What a transport moves: types that not every transport knows as bytes.
at::Tensor as_moved(const at::Tensor& buffer) {
  return can_be_summed(buffer) && buffer.scalar_type() != at::kShort ? buffer : plain_bytes(buffer);
}

void check_divisible(const at::Tensor& full, int size, std::string_view label) {
  TESSERA_CHECK(full.numel() % size == 0, label, ": ", full.numel(), " elements for ", size, " ranks");
}

bool sums_in_fp32(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 ||
         tensor.scalar_type() == at::kHalf;
}

}  // namespace

void write_result(const at::Tensor& sum, const ReduceInto& into) {
  const at::DisableRecordFunctionGuard silent;
  const at::NoGradGuard no_grad;
  at::Tensor shard = into.shard;
  if (into.add) {
    into.scale == 1 ? shard.add_(sum) : shard.add_(sum, into.scale);  // integers take no other scale
    return;
  }
  if (shard.data_ptr() != sum.data_ptr()) shard.copy_(sum);
  if (into.scale != 1) shard.mul_(into.scale);
}

Communicator::Communicator(at::Device device) : device_(device) { install_cpu_allocator(); }

WorkPtr Communicator::all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) {
  check_buffer(full, label);
  check_buffer(shard, label);
  check_divisible(full, size(), label);
  TESSERA_CHECK(shard.numel() * size() == full.numel(), label, ": a shard of ", shard.numel(), " for ",
                full.numel());
  TESSERA_CHECK(shard.scalar_type() == full.scalar_type() && shard.device() == full.device(), label);
  return do_all_gather(as_moved(full), as_moved(shard), label);
}

WorkPtr Communicator::reduce_scatter(const at::Tensor& full, const ReduceInto& into, std::string_view label) {
  check_summed(full, label);
  check_summed(into.shard, label);
  check_divisible(full, size(), label);
  TESSERA_CHECK(into.shard.numel() * size() == full.numel(), label, ": a shard of ", into.shard.numel(),
                " for ", full.numel());
  TESSERA_CHECK(
      into.shard.scalar_type() == full.scalar_type() || (sums_in_fp32(full) && sums_in_fp32(into.shard)),
      label, ": ", full.scalar_type(), " into ", into.shard.scalar_type());
  TESSERA_CHECK(into.shard.device() == full.device(), label);
  TESSERA_CHECK(into.scale == 1 || full.is_floating_point(), label, " is scaled");
  const auto* own_slice = static_cast<const std::byte*>(full.const_data_ptr()) +
                          rank() * static_cast<int64_t>(full.nbytes()) / size();
  TESSERA_CHECK(!into.add || full.numel() == 0 || into.shard.const_data_ptr() != own_slice, label,
                " adds to what it reduces");
  return do_reduce_scatter(full, into, label);
}

WorkPtr Communicator::reduce_scatter(const at::Tensor& full, std::string_view label) {
  check_buffer(full, label);
  check_divisible(full, size(), label);
  const int64_t numel = full.numel() / size();
  return reduce_scatter(full, {plain_view(full, rank() * numel, numel)}, label);
}

WorkPtr Communicator::all_reduce(const at::Tensor& full, std::string_view label, double scale) {
  check_summed(full, label);
  TESSERA_CHECK(scale == 1 || full.is_floating_point(), label, " is scaled");
  return do_all_reduce(full, scale, label);
}

at::Tensor Communicator::allocate_symmetric(int64_t bytes, at::Device device, std::string_view) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

at::Tensor Communicator::peer_view(const at::Tensor&, int) { return {}; }

at::Tensor Communicator::allocate_shared(int64_t, std::string_view) { return {}; }

WorkPtr Communicator::broadcast(const at::Tensor& buffer, int root, std::string_view label) {
  check_buffer(buffer, label);
  TESSERA_CHECK(root >= 0 && root < size(), label, ": root ", root);
  return do_broadcast(as_moved(buffer), root, label);
}

void Communicator::check_exchanged(bool fits, std::string_view label) {
  if (!fits) throw CommError("exchange of \"", label, "\": ranks give values of different sizes");
}

}  // namespace tessera::comm
