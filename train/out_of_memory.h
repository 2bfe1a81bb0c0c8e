// Error messages for out-of-memory errors.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/memory_meter.h"

namespace tessera::train {

/// Local. Whether one of libtorch's allocators has thrown this error. CUDA's throws c10::OutOfMemoryError,
/// which TorchScript turns into another type with the same message; the CPU's is known by its message only.
bool is_out_of_memory(const std::exception& error);

/// Local. Throws tessera::Error with one line: what was asked for, what was allocated (with `meter`, which
/// memory_breakdown makes), and what to change. `when`: "in step 3".
[[noreturn]] void fail_for_memory(const std::exception& error, const std::string& when,
                                  const EngineConfig& config, const comm::Communicator& comm,
                                  const std::optional<MemoryMeter>& meter);

}  // namespace tessera::train
