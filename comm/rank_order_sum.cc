#include "comm/rank_order_sum.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <vector>

#include "comm/shm/reduce.h"
#include "comm/torch_dtype.h"
#include "core/memory_use.h"

namespace tessera::comm {

void sum_in_rank_order(const void* slices, at::ScalarType dtype, int num_ranks, const ReduceInto& into) {
  const int64_t numel = into.shard.numel();
  std::vector<const void*> inputs;
  for (int rank = 0; rank < num_ranks; ++rank)
    inputs.push_back(static_cast<const char*>(slices) + rank * numel * size_bytes(from_torch(dtype)));
  shm::reduce(
      {.dtype = from_torch(dtype),
       .inputs = inputs.data(),
       .num_inputs = num_ranks,
       .numel = numel,
       .output = {into.shard.data_ptr(), from_torch(into.shard.scalar_type()), into.scale, into.add}});
}

at::Tensor reduction_buffer(const at::Tensor& full) {
  const MemoryFor use(MemoryUse::kCommunication);
  const at::DisableRecordFunctionGuard silent;
  return at::empty({static_cast<int64_t>(full.nbytes())}, at::kByte);
}

}  // namespace tessera::comm
