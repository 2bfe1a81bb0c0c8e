#include "python/binding/interrupt.h"

#include <pybind11/pybind11.h>

#include <utility>

namespace tessera::python {
namespace {

/// What the last handler raised, until the call that it ended returns to Python. The main thread's alone.
PyObject* raised = nullptr;

}  // namespace

void check_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  Py_XDECREF(std::exchange(raised, value));
  throw Interrupted();
}

void restore_interrupt() {
  PyObject* const value = std::exchange(raised, nullptr);
  if (value == nullptr) return PyErr_SetNone(PyExc_KeyboardInterrupt);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
}

}  // namespace tessera::python
