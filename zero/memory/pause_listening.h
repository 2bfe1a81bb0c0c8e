// Scopes of the engine's own copies and collectives.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

namespace tessera::zero {

/// While one lives, this thread's operators are not heard by listeners.
using PauseListening = at::DisableRecordFunctionGuard;

/// The same, and autograd does not record them.
struct OurOwnWork {
  PauseListening not_heard;
  at::NoGradGuard not_recorded;
};

}  // namespace tessera::zero
