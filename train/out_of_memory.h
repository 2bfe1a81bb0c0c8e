// What to say when memory does not suffice.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/memory_meter.h"

namespace tessera::train {

/// Local. Whether an allocator of libtorch's has thrown it: CUDA's has a type for it, which
/// TorchScript forgets, the CPU's a message.
bool is_out_of_memory(const std::exception& error);

/// Local. Throws tessera::Error, one line: what was asked for, what was held (`meter`: memory_breakdown), and
/// what to change. `when`: "in step 3".
[[noreturn]] void fail_for_memory(const std::exception& error, const std::string& when,
                                  const EngineConfig& config, const comm::Communicator& comm,
                                  const std::optional<MemoryMeter>& meter);

}  // namespace tessera::train
