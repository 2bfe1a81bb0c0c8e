#include "comm/communicator.h"

#include <ATen/ATen.h>

#include "core/check.h"

namespace tessera::comm {
namespace {

bool supported(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kLong:
    case at::kInt:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

void check_buffer(const at::Tensor& buffer, std::string_view label) {
  TESSERA_CHECK(buffer.defined(), label);
  TESSERA_CHECK(buffer.dim() == 1 && buffer.is_contiguous(), label, " has shape ", buffer.sizes());
  TESSERA_CHECK(supported(buffer.scalar_type()), label, " is ", buffer.scalar_type());
}

void check_divisible(const at::Tensor& full, int size, std::string_view label) {
  TESSERA_CHECK(full.numel() % size == 0, label, ": ", full.numel(), " elements for ", size, " ranks");
}

}  // namespace

WorkPtr Communicator::all_gather(const at::Tensor& full, const at::Tensor& shard, std::string_view label) {
  check_buffer(full, label);
  check_buffer(shard, label);
  check_divisible(full, size(), label);
  TESSERA_CHECK(shard.numel() * size() == full.numel(), label, ": a shard of ", shard.numel(), " for ",
                full.numel());
  TESSERA_CHECK(shard.scalar_type() == full.scalar_type() && shard.device() == full.device(), label);
  ++counts_.all_gathers;
  counts_.bytes += static_cast<int64_t>(full.nbytes());
  return do_all_gather(full, shard, label);
}

WorkPtr Communicator::reduce_scatter(const at::Tensor& full, std::string_view label) {
  check_buffer(full, label);
  check_divisible(full, size(), label);
  ++counts_.reduce_scatters;
  counts_.bytes += static_cast<int64_t>(full.nbytes());
  return do_reduce_scatter(full, label);
}

WorkPtr Communicator::all_reduce(const at::Tensor& full, std::string_view label) {
  check_buffer(full, label);
  ++counts_.all_reduces;
  counts_.bytes += static_cast<int64_t>(full.nbytes());
  return do_all_reduce(full, label);
}

WorkPtr Communicator::broadcast(const at::Tensor& buffer, int root, std::string_view label) {
  check_buffer(buffer, label);
  TESSERA_CHECK(root >= 0 && root < size(), label, ": root ", root);
  ++counts_.broadcasts;
  counts_.bytes += static_cast<int64_t>(buffer.nbytes());
  return do_broadcast(buffer, root, label);
}

void Communicator::barrier(std::string_view label) {
  ++counts_.barriers;
  do_barrier(label);
}

}  // namespace tessera::comm
