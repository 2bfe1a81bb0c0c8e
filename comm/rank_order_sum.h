// Tensors for comm/shm/sum.h, the one pass that adds up what the ranks have.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"
#include "comm/shm/sum.h"

namespace tessera::comm {

/// Local. The element that a tensor's dtype is.
shm::Element element_of(const at::Tensor& tensor);

/// Local. `slices`: one slice of into.shard.numel() elements of type `element` a rank, one after another;
/// their sum in rank order goes to `into`. CPU. Dispatches no operator.
void sum_in_rank_order(const void* slices, shm::Element element, int num_ranks, const ReduceInto& into);

/// Local. (bytes of `full`) uint8, where the slices arrive when a reduction goes over
/// a network; MemoryUse::kCommunication.
at::Tensor reduction_buffer(const at::Tensor& full);

}  // namespace tessera::comm
