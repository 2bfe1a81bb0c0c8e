// The parts of the module tessera._engine, which module.cc puts together. python/tessera/_engine.pyi is the
// description of what they add.
#pragma once

#include <pybind11/pybind11.h>

namespace tessera::python {

void bind_comm(pybind11::module_& module);
void bind_compiled_graphs(pybind11::module_& module);
void bind_config(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_reports(pybind11::module_& module);

/// From now on what this module's functions throw becomes an exception of tessera.errors: ConfigError,
/// CommError, CheckpointError, DataError, or their base Error. What Python raised inside of a call (in an
/// autograd.Function, or a signal handler) is raised again as it is.
void register_errors();

/// Is for whatever may wait for other ranks or take long. Collectives need it: a rank that waits with the GIL
/// held stops every other thread of Python, and backward() with it held is an error in libtorch.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace tessera::python
