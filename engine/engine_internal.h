// What tests put in place of parts of an Engine.
#pragma once

#include <memory>

#include "comm/memory/host_transfer.h"
#include "core/test_seam.h"
#include "engine/engine.h"

namespace tessera {

/// Engines take it for what connects the model's device with the host's memory, which are then taken to be
/// apart. Null: CUDA's own, where the device is a GPU.
using ScopedHostTransfer = TestSeam<Engine, std::shared_ptr<comm::HostTransfer>>;

}  // namespace tessera
