// CompiledGraphRead for tessera.compiled_graphs.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "python/binding/bindings.h"
#include "zero/gather/operator_listener.h"

namespace tessera::python {
namespace {

namespace py = pybind11;

/// A context manager: the graph runs inside of it. Used once.
class GraphRead {
 public:
  /// `inputs`: of the graph, tensors and other values. They are not kept: a graph frees them as it goes.
  explicit GraphRead(const py::sequence& inputs) {
    for (const py::handle item : inputs)
      if (THPVariable_Check(item.ptr())) inputs_.push_back(THPVariable_Unpack(item.ptr()));
  }
  void enter() {
    const std::vector<at::Tensor> inputs = std::exchange(inputs_, {});
    const py::gil_scoped_release release;
    read_.emplace(inputs);
  }
  void exit() {
    const py::gil_scoped_release release;
    read_.reset();
  }

 private:
  std::vector<at::Tensor> inputs_;
  std::optional<zero::CompiledGraphRead> read_;
};

}  // namespace

void bind_compiled_graphs(py::module_& module) {
  py::class_<GraphRead>(module, "CompiledGraphRead")
      .def(py::init<const py::sequence&>(), py::arg("inputs"))
      .def("__enter__", &GraphRead::enter)
      .def("__exit__", [](GraphRead& self, const py::args&) { self.exit(); });
}

}  // namespace tessera::python
