// While one lives, this thread's operators are not heard by listeners: the engine's own copies and
// collectives.
#pragma once

#include <ATen/record_function.h>

namespace tessera::zero {

using PauseListening = at::DisableRecordFunctionGuard;

}  // namespace tessera::zero
