// Communicator: a rank's end of the group, for tessera.comm.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/init/init.h"
#include "comm/init/transport_communicator.h"
#include "comm/labelled.h"
#include "core/environment/environment.h"
#include "core/error.h"
#include "core/str.h"
#include "launcher/process/error_file.h"
#include "python/binding/bindings.h"
#include "zero/model/model_program.h"

namespace tessera::python {
namespace {

namespace py = pybind11;
using comm::Communicator;

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// Is for JoinOptions::on_block. Lets go of the GIL, if this thread has it, until the result is destroyed.
std::shared_ptr<void> release_gil() {
  return PyGILState_Check() ? std::make_shared<py::gil_scoped_release>() : nullptr;
}

comm::CommunicatorPtr join(const std::string& backend, const std::string& device, double timeout_s,
                           double rendezvous_timeout_s, bool verify, bool log) {
  comm::JoinOptions options;
  options.backend = backend;
  options.device = device;
  options.timeout = milliseconds_of(timeout_s);
  options.rendezvous_timeout = milliseconds_of(rendezvous_timeout_s);
  options.verify = verify;
  if (log) options.log = Logger(LogOptions{});
  options.interrupt = &check_signals;
  options.on_block = &release_gil;
  return comm::join(options);
}

/// torchrun's variables for this process, whatever launcher has started it.
std::map<std::string, std::string> torchrun_variables() {
  const Environment env = environment();
  std::map<std::string, std::string> variables = {{"RANK", std::to_string(env.rank)},
                                                  {"WORLD_SIZE", std::to_string(env.world_size)},
                                                  {"LOCAL_RANK", std::to_string(env.local_rank)},
                                                  {"LOCAL_WORLD_SIZE", std::to_string(env.local_world_size)}};
  if (env.world_size > 1) {
    variables["MASTER_ADDR"] = env.master_addr;
    variables["MASTER_PORT"] = std::to_string(env.master_port);
  }
  return variables;
}

/// The buffer that collectives take: one-dimensional, of a dense tensor.
at::Tensor flat(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_contiguous())
    throw Error("a collective works in place and needs a contiguous tensor: give tensor.contiguous()");
  return tensor.detach().view(-1);
}

/// A shape that is not a buffer's is a part of the label, which is compared among ranks.
std::string with_shape(const std::string& label, const at::Tensor& tensor) {
  const bool is_buffer = tensor.dim() == 1 && tensor.numel() > 0;
  return is_buffer ? label : tessera::str(label, " of shape ", tensor.sizes());
}

/// A tensor without elements, which a communicator has nothing to do for, is compared with other ranks', too:
/// one that has some would be combined with this rank's next tensor.
bool is_barrier(Communicator& comm, const std::string& label, const at::Tensor& tensor) {
  if (tensor.numel() > 0) return false;
  comm.barrier(with_shape(label, tensor));
  return true;
}

/// Waits for a collective that has changed `tensor`. Autograd refuses a backward pass that needs what was
/// there before.
void finish(const Communicator& comm, const comm::WorkPtr& work, const at::Tensor& tensor) {
  work->wait();
  if (comm.size() > 1 && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

std::vector<py::bytes> exchange(Communicator& self, const std::string& value, const std::string& label) {
  const std::vector<std::string> values = self.exchange(value, label);
  return {values.begin(), values.end()};
}

/// Tells the other ranks why this one ends. The communicator is of no use any more.
void leave(Communicator& self, const std::string& reason) {
  if (auto* group = dynamic_cast<comm::TransportCommunicator*>(&self))
    group->abort(group->has_failed_by_peer() ? comm::kLeftByFault : std::string_view(reason));
}

/// Whether a group of this rank has failed because another rank had ended or left.
bool has_failed_by_peer(const Communicator& self) {
  const auto* group = dynamic_cast<const comm::TransportCommunicator*>(&self);
  return group != nullptr && group->has_failed_by_peer();
}

/// Reports an exit code other than 0, if nothing was reported, with the time of this call. Only the C library
/// knows the code of `raise SystemExit(3)`, when Python has ended and all has been destroyed.
void report_exit_code() {
  static const int64_t time_ns = launcher::monotonic_ns();
  ::on_exit(
      [](int code, void*) {
        if (code != 0) launcher::report_error(str("exit code ", code), launcher::ErrorKind::kOwn, time_ns);
      },
      nullptr);
}

}  // namespace

void bind_comm(py::module_& module) {
  py::class_<Communicator, comm::CommunicatorPtr>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("backend", [](const Communicator& self) { return std::string(self.backend()); })
      .def_property_readonly("device", &Communicator::device)
      .def("barrier", &Communicator::barrier, py::arg("label"))
      .def(
          "all_reduce",
          [](Communicator& self, const at::Tensor& tensor, const std::string& label, double scale) {
            if (is_barrier(self, label, tensor)) return;
            finish(self, self.all_reduce(flat(tensor), with_shape(label, tensor), scale), tensor);
          },
          py::arg("tensor"), py::arg("label"), py::arg("scale"))
      .def(
          "broadcast",
          [](Communicator& self, const at::Tensor& tensor, int root, const std::string& label) {
            if (is_barrier(self, label, tensor)) return;
            finish(self, self.broadcast(flat(tensor), root, with_shape(label, tensor)), tensor);
          },
          py::arg("tensor"), py::arg("root"), py::arg("label"))
      .def("exchange", &exchange, py::arg("value"), py::arg("label"))
      .def(
          "labelled",
          [](const comm::CommunicatorPtr& self, const std::string& suffix) -> comm::CommunicatorPtr {
            return std::make_shared<comm::LabelledCommunicator>(self, suffix);
          },
          py::arg("suffix"));

  module.def(
      "check_same_program",
      [](Communicator& comm, const zero::Program& program) { zero::check_same_program(program, comm); },
      py::arg("comm"), py::arg("program"), ReleaseGil());
  module.def("environment", &torchrun_variables);
  module.def("leave", &leave, py::arg("comm"), py::arg("reason"), ReleaseGil());
  module.def(
      "report_error",
      [](const std::string& message, bool of_peer) {
        launcher::report_error(message, of_peer ? launcher::ErrorKind::kOfPeer : launcher::ErrorKind::kOwn);
      },
      py::arg("message"), py::arg("of_peer"));
  module.def("report_exit_code", &report_exit_code);
  module.def("has_failed_by_peer", &has_failed_by_peer, py::arg("comm"));
  module.def("await_other_ranks", [] { comm::await_other_ranks(&check_signals); }, ReleaseGil());
  module.def("join", &join, py::arg("backend"), py::arg("device"), py::arg("timeout_s"),
             py::arg("rendezvous_timeout_s"), py::arg("verify"), py::arg("log"), ReleaseGil());
}

}  // namespace tessera::python
