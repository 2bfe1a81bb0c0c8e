// Memory from elsewhere than libtorch's allocators, reported as they report
// theirs (engine/memory_meter.h hears it).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera::comm {

/// Local. (bytes) uint8 on the CPU: a tensor over `data`, which `owner` keeps. What
/// `num_sharing` ranks share counts in parts.
at::Tensor reported_memory(std::shared_ptr<void> owner, void* data, int64_t bytes, int num_sharing);

}  // namespace tessera::comm
