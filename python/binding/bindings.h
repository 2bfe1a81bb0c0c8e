// The parts of the module tessera._engine, which module.cc puts together. python/tessera/_engine.pyi is the
// description of what they add.
#pragma once

#include <pybind11/pybind11.h>

namespace tessera::python {

void bind_comm(pybind11::module_& module);
void bind_config(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_reports(pybind11::module_& module);

/// From now on what this module's functions throw becomes an exception of tessera.errors: ConfigError,
/// CommError, CheckpointError, DataError, or their base Error. What Python raised inside of a call (in an
/// autograd.Function, or a signal handler) is raised again as it is.
void register_errors();

/// Is for comm::JoinOptions::interrupt. Runs the handlers of the signals that have come, as Python does
/// between two instructions: on the main thread; elsewhere it does nothing. Takes the GIL. Throws where one
/// has raised, and the call from Python raises that.
void check_signals();

/// Is for whatever may wait for other ranks or take long. Collectives need it: a rank that waits with the GIL
/// held stops every other thread of Python, and backward() with it held is an error in libtorch.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace tessera::python
