// What tests hear of a SpillFile.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "core/async_io/spill_file.h"
#include "core/test_seam.h"

namespace tessera {

/// Called before each operation ("reserve", "read", "write") on the thread that does it; an errno value other
/// than 0 makes it fail so. After a short read or write the rest is an operation of its own. Must not throw.
using SpillFileProbe = std::function<int(std::string_view operation, int64_t offset, int64_t bytes)>;
using ScopedSpillFileProbe = TestSeam<SpillFile, SpillFileProbe>;

}  // namespace tessera
