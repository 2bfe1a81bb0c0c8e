// Memory that is not from libtorch's allocators, reported to its profiler as they report theirs
// (engine/profile/memory_meter.h counts it).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera::comm {

/// (bytes) uint8: a CPU tensor over `data`, which `owner` keeps alive. Reported as
/// bytes / num_sharing, the number of ranks that share it.
at::Tensor reported_memory(std::shared_ptr<void> owner, void* data, int64_t bytes, int num_sharing);

}  // namespace tessera::comm
