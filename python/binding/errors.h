// Errors of C++ as those of tessera.errors.
#pragma once

#include <pybind11/pybind11.h>

namespace tessera::python {

/// From now on what this module's functions throw becomes an exception of tessera.errors: ConfigError,
/// CommError, CheckpointError, DataError, or their base Error. What Python raised inside of a call (in an
/// autograd.Function, or a signal handler) is raised again as it is.
void register_errors();

}  // namespace tessera::python
