// tessera._engine: Engine and Communicator for the package python/tessera, which has all that concerns
// modules, optimizers and containers of Python.
//
// Who holds what: C++ holds tensors, and two objects of this package (engine.cc: PyModuleState,
// PyWholeOptimizer), neither of which refers to the module or the engine but weakly. Another reference from
// C++ to Python would be invisible to the garbage collector, and a model, its optimizer and its engine refer
// to each other. Python holds the module, and tells the engine when the module's parameters are other
// tensors.
#include <pybind11/pybind11.h>

#include "python/binding/bindings.h"

PYBIND11_MODULE(_engine, module) {
  module.attr("__version__") = TESSERA_VERSION;
  tessera::python::register_errors();
  tessera::python::bind_comm(module);
  tessera::python::bind_config(module);
  tessera::python::bind_engine(module);
  tessera::python::bind_reports(module);
}
