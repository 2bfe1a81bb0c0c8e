// The engine's scalar keys together with the fields they fill. For .cc files
// only (brings in nlohmann/json.hpp).
#pragma once

#include <vector>

#include "engine/config/bind.h"
#include "engine/config/config.h"

namespace tessera::config {

/// Local. Every used key but the batch triple, the optimizer and the scheduler,
/// which have rules of their own.
std::vector<Binding<EngineConfig>> engine_bindings();

/// Local. The part of them that is about monitors.
std::vector<Binding<EngineConfig>> monitor_bindings();

}  // namespace tessera::config
