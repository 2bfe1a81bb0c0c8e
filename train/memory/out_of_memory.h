// Error messages for out-of-memory errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "core/error.h"
#include "engine/config/config.h"
#include "engine/engine.h"
#include "engine/profile/memory_meter.h"

namespace tessera::train {

/// Whether one of libtorch's allocators has thrown this error. CUDA's throws c10::OutOfMemoryError,
/// which TorchScript turns into another type with the same message; the CPU's is known by its message only.
bool is_out_of_memory(const std::exception& error);

/// From now on allocations that fail on this rank's device are noted
/// (core/memory/allocation_failure.h), as those on the CPU are. The first call of a process has this effect,
/// and later calls do nothing. Throws Error without the CUDA plugin.
void note_failures_of(at::Device device);

/// What a rank was doing.
struct MemoryDemand {
  std::string when;            ///< "in step 3"
  std::string batch_key = {};  ///< the key by which activations become smaller; empty: there are none
  int64_t batch = 0;           ///< its value
  bool trains = false;         ///< activations are kept for backward
};

/// What is known of a rank.
struct RankMemory {
  const EngineConfig& config;
  const comm::Communicator& comm;
  const std::optional<MemoryMeter>& meter;  ///< which memory_breakdown makes
  Engine* engine = nullptr;                 ///< null: not made yet
};

/// Memory has run out on this rank.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// Throws OutOfMemoryError with one line: what was asked for, for which use and unit, what was
/// allocated, and which changes would make room (train/memory/memory_advice.h). Takes the failure that the
/// allocator has noted (core/memory/allocation_failure.h); without one, and without an engine, changes are
/// named that may help.
[[noreturn]] void fail_for_memory(const std::exception& error, const MemoryDemand& demand,
                                  const RankMemory& rank);

}  // namespace tessera::train
