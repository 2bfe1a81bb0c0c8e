#include "comm/rank_order_sum.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "core/check.h"
#include "core/memory_use.h"

namespace tessera::comm {

shm::Element element_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return shm::Element::kFloat64;
    case at::kFloat: return shm::Element::kFloat32;
    case at::kBFloat16: return shm::Element::kBFloat16;
    case at::kHalf: return shm::Element::kFloat16;
    case at::kLong: return shm::Element::kInt64;
    case at::kInt: return shm::Element::kInt32;
    case at::kChar: return shm::Element::kInt8;
    case at::kByte: return shm::Element::kUInt8;
    case at::kBool: return shm::Element::kBool;
    default: break;
  }
  TESSERA_CHECK(false, tensor.scalar_type());
  return shm::Element::kUInt8;
}

void sum_in_rank_order(const void* slices, shm::Element element, int num_ranks, const ReduceInto& into) {
  const int64_t numel = into.shard.numel();
  std::vector<const void*> inputs;
  for (int rank = 0; rank < num_ranks; ++rank)
    inputs.push_back(static_cast<const char*>(slices) + rank * numel * shm::size_of(element));
  shm::add_up({.element = element,
               .inputs = inputs.data(),
               .num_inputs = num_ranks,
               .numel = numel,
               .output = into.shard.data_ptr(),
               .output_element = element_of(into.shard),
               .scale = into.scale,
               .add = into.add});
}

at::Tensor reduction_buffer(const at::Tensor& full) {
  const MemoryFor use(MemoryUse::kCommunication);
  const at::DisableRecordFunctionGuard silent;
  return at::empty({static_cast<int64_t>(full.nbytes())}, at::kByte);
}

}  // namespace tessera::comm
