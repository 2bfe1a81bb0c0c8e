// Monitors and MemoryMeter for tessera.reports: a training loop in Python writes its numbers with the same
// code as `tessera train`.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "core/log.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/profile/memory_meter.h"
#include "monitor/monitors.h"
#include "python/binding/bindings.h"
#include "train/report/monitoring.h"
#include "train/report/report.h"

namespace tessera::python {
namespace {

namespace py = pybind11;

/// Opens the monitors of a configuration with DeepSpeed's defaults: a loop of one's own has no folder of a
/// run. `number`: of the engine among those that this process has with the same folders, from 1; later ones
/// get folders of their own, since two monitors cannot write to one file. `resumed_after`: records of later
/// steps are removed; unset: earlier files are replaced.
std::unique_ptr<Monitors> open_monitors(const EngineConfig& config, int number,
                                        std::optional<int64_t> resumed_after) {
  MonitorConfig monitors = config.monitors;
  std::string name = "DeepSpeedJobName";
  for (FileMonitorConfig* file : {&monitors.tensorboard, &monitors.csv, &monitors.jsonl}) {
    if (file->output_path.empty()) file->output_path = ".";
    if (file->job_name.empty()) file->job_name = name;
    if (number > 1) file->job_name += str("_", number);
  }
  if (number > 1) name += str("_", number);
  auto opened = std::make_unique<Monitors>(train::open_monitors(
      monitors, {.name = name, .folder = {}, .resumed_after = resumed_after, .log = Logger(LogOptions{})}));
  if (!opened->empty()) opened->params(config::shown_engine_config(config));
  return opened;
}

}  // namespace

void bind_reports(py::module_& module) {
  py::class_<Monitors>(module, "Monitors")
      .def(py::init(&open_monitors), py::arg("config"), py::arg("number"), py::arg("resumed_after"),
           ReleaseGil())
      .def_property_readonly("empty", &Monitors::empty)
      .def("scalars", &Monitors::scalars, py::arg("step"), py::arg("scalars"), ReleaseGil())
      .def(
          "close",
          [](Monitors& self, bool failed) { self.close(failed ? RunStatus::kFailed : RunStatus::kFinished); },
          py::arg("failed"), ReleaseGil());
  py::class_<MemoryMeter>(module, "MemoryMeter")
      .def(py::init([](at::Device device) {
             auto meter = std::make_unique<MemoryMeter>(device.type());
             meter->set_default_use(MemoryUse::kActivations);
             return meter;
           }),
           py::arg("device"))
      .def("take_peak",
           [](MemoryMeter& self) {
             std::string text = train::format_memory(self.peak());
             self.reset_peak();
             return text;
           })
      .def("at_failure", [](const MemoryMeter& self) -> std::optional<std::string> {
        const std::optional<MemoryBytes> bytes = self.at_failure();
        return bytes ? std::optional(train::format_memory(*bytes)) : std::nullopt;
      });
}

}  // namespace tessera::python
