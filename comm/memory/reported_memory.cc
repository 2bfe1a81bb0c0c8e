#include "comm/memory/reported_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>

namespace tessera::comm {
namespace {

void report(void* data, int64_t bytes) {
  if (c10::memoryProfilingEnabled()) c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, at::kCPU);
}

}  // namespace

at::Tensor reported_memory(std::shared_ptr<void> owner, void* data, int64_t bytes, int num_sharing) {
  const int64_t share = (bytes + num_sharing - 1) / num_sharing;
  at::Tensor memory = at::for_blob(data, {bytes})
                          .deleter([owner = std::move(owner), share](void* freed) { report(freed, -share); })
                          .options(at::TensorOptions().dtype(at::kByte))
                          .make_tensor();
  report(data, share);
  return memory;
}

}  // namespace tessera::comm
