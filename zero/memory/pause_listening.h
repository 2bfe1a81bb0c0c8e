// Scopes of the engine's own copies and collectives.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::zero {

/// While one lives, this thread's operators pass by what the caller has put before all operators: modes of
/// Python (TorchDispatchMode), torch.func, functionalization, a tracer. These would count or record what is
/// none of the caller's, and a buffer that they make has no memory.
class BelowModes {
  const c10::impl::ExcludeDispatchKeyGuard excluded_{
      c10::python_ks | c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                            c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                            c10::DispatchKey::Functionalize, c10::DispatchKey::Tracer})};
};

/// While one lives, this thread's operators are not heard by listeners.
using PauseListening = at::DisableRecordFunctionGuard;

/// The same, and autograd does not record them.
struct OurOwnWork {
  PauseListening not_heard;
  at::NoGradGuard not_recorded;
};

}  // namespace tessera::zero
