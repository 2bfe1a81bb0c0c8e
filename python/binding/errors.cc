#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

#include "checkpoint/checkpoint_error.h"
#include "core/peer_failure.h"
#include "core/utf8.h"
#include "python/binding/bindings.h"
#include "python/binding/interrupt.h"

namespace tessera::python {
namespace {

namespace py = pybind11;

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

void register_errors() { py::register_local_exception_translator(&translate); }

}  // namespace tessera::python
