#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "core/peer_failure.h"
#include "core/utf8.h"
#include "python/binding/bindings.h"

namespace tessera::python {
namespace {

namespace py = pybind11;

/// Thrown where a signal handler of Python has raised. It carries no Python object, because an engine that it
/// passes through keeps the exception; the object is kept aside until restore_interrupt().
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted by a signal"; }
};

/// What the last handler raised, until the call that it ended returns to Python. The main thread's alone.
PyObject* raised = nullptr;

/// Sets what the handler raised as Python's current error (KeyboardInterrupt if that was taken already).
/// Needs the GIL.
void restore_interrupt() {
  PyObject* const value = std::exchange(raised, nullptr);
  if (value == nullptr) return PyErr_SetNone(PyExc_KeyboardInterrupt);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
}

/// The class is looked up for each error: a module that kept it would hold a Python object for ever.
void set_error(const char* name, const std::string& what, bool of_peer = false) {
  try {
    const py::object type = py::module_::import("tessera.errors").attr(name);
    const py::object error = type(without_control_characters(what));
    if (of_peer) error.attr("of_peer") = true;
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (py::error_already_set& error) {  // at interpreter shutdown
    error.restore();
  }
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const ConfigError& error) {
    set_error("ConfigError", error.what());
  } catch (const PeerFailure& error) {
    set_error("CommError", error.what(), /*of_peer=*/true);
  } catch (const CommError& error) {
    set_error("CommError", error.what());
  } catch (const DataError& error) {
    set_error("DataError", error.what());
  } catch (const CheckpointError& error) {
    set_error("CheckpointError", error.what());
  } catch (const Error& error) {
    set_error("Error", error.what());
  } catch (const Interrupted&) {
    restore_interrupt();
  } catch (python_error& error) {  // libtorch's, of Python code that autograd called
    error.restore();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  Py_XDECREF(std::exchange(raised, value));
  throw Interrupted();
}

void register_errors() { py::register_local_exception_translator(&translate); }

}  // namespace tessera::python
