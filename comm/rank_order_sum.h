// Sums of all ranks' slices, in rank order, for a transport over a network.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace tessera::comm {

/// Local. `slices`: one slice of into.shard.numel() elements of `dtype` a rank, one after another; their sum
/// in rank order goes to `into`. CPU. Dispatches no operator.
void sum_in_rank_order(const void* slices, at::ScalarType dtype, int num_ranks, const ReduceInto& into);

/// Local. (bytes of `full`) uint8, for the slices that arrive; MemoryUse::kCommunication.
at::Tensor reduction_buffer(const at::Tensor& full);

}  // namespace tessera::comm
