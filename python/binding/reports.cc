// Monitors and MemoryMeter for tessera.reports and tessera.memory: a training loop in Python writes its
// numbers with the same code as `tessera train` and `tessera memory`.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "core/json/json_reader.h"
#include "core/log.h"
#include "core/str.h"
#include "engine/config/parse.h"
#include "engine/config/sharding_plan.h"
#include "engine/profile/memory_meter.h"
#include "monitor/monitors.h"
#include "python/binding/bindings.h"
#include "python/binding/python_engine.h"
#include "train/memory_page.h"
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
  if (!opened->empty()) opened->params(config::write_engine_config(config));
  return opened;
}

/// The bytes of model state on `tier`, by use.
MemoryBytes bytes_of(const zero::StateBytes& state) {
  MemoryBytes bytes;
  bytes[MemoryUse::kParameters] = state.parameters;
  bytes[MemoryUse::kGradients] = state.gradients;
  bytes[MemoryUse::kMaster] = state.master;
  bytes[MemoryUse::kOptimizer] = state.optimizer;
  bytes[MemoryUse::kSnapshot] = state.snapshot;
  return bytes;
}

/// Ends the record, and returns it as JSON. `counts_state`: the meter is younger than the engine, and does
/// not know its model state.
std::string take_timeline(MemoryMeter& meter, const PyEngine& engine, const train::Phases& phases,
                          bool counts_state) {
  MemoryRecord record = meter.take_record();
  if (counts_state) {
    const MemoryBytes state = bytes_of(engine.measured_bytes());
    for (size_t use = 0; use < kNumMemoryUses; ++use)
      if (state.by_use[use] != 0)
        record.blocks.push_back({.bytes = state.by_use[use], .use = static_cast<MemoryUse>(use)});
  }
  nlohmann::ordered_json json = train::timeline_json(record, phases);
  json["stage"] = engine.config().zero.stage;
  json["complete"] = !counts_state;
  return json.dump();
}

std::string memory_page(PyEngine& engine, const std::string& timeline) {
  train::MeasuredRun run{.label = str("stage ", engine.config().zero.stage),
                         .trial = {},
                         .timeline = parse_ordered_json(timeline)};
  train::MemoryTrial& trial = run.trial;
  train::describe_engine(engine, trial);
  trial.formula = engine.formula_bytes();
  trial.held = bytes_of(engine.measured_bytes());
  trial.peak = train::peak_by_use(run.timeline);
  trial.micro_batch = engine.config().train_micro_batch_size_per_gpu;
  trial.step_ms = run.timeline.at("nanoseconds").get<double>() / 1e6;
  trial.host = {.used = engine.measured_bytes(zero::Tier::kHost).total() > 0,
                .formula = engine.formula_bytes(zero::Tier::kHost),
                .held = engine.measured_bytes(zero::Tier::kHost),
                .pinned = 0};
  trial.disk.used = engine.measured_bytes(zero::Tier::kDisk).total() > 0;
  trial.disk.formula = engine.formula_bytes(zero::Tier::kDisk);
  trial.disk.held = engine.measured_bytes(zero::Tier::kDisk);
  train::MemoryPage page{
      .model = trial.model,
      .optimizer = trial.optimizer,
      .world_size = trial.world_size,
      .stage = trial.stage,
      .is_complete = run.timeline.at("complete"),
      .in_groups = plan_sharding(engine.config(), trial.world_size, engine.device().is_cuda()).groups !=
                   zero::GroupSizes()};
  page.runs.push_back(std::move(run));
  return train::memory_page_html(page);
}

std::string memory_trace(const std::string& timeline) {
  nlohmann::ordered_json json = parse_ordered_json(timeline);
  const std::string label = str("stage ", json.at("stage").get<int>());
  return train::memory_trace({{label, std::move(json)}});
}

}  // namespace

void bind_reports(py::module_& module) {
  py::class_<Monitors>(module, "Monitors")
      .def(py::init(&open_monitors), py::arg("config"), py::arg("number"), py::arg("resumed_after"),
           ReleaseGil())
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
      .def("peak",
           [](const MemoryMeter& self) {
             const MemoryBytes peak = self.peak();
             std::vector<std::pair<std::string, int64_t>> bytes;
             for (size_t use = 0; use < kNumMemoryUses; ++use)
               bytes.emplace_back(key_of(static_cast<MemoryUse>(use)), peak.by_use[use]);
             bytes.emplace_back("total", peak.total());
             return bytes;
           })
      .def(
          "record",
          [](MemoryMeter& self, PyEngine& engine) { self.record(&engine.sharded_model().layout()); },
          py::arg("engine"))
      .def("take_timeline", &take_timeline, py::arg("engine"), py::arg("phases"), py::arg("counts_state"))
      .def("at_failure", [](const MemoryMeter& self) -> std::optional<std::string> {
        const std::optional<MemoryBytes> bytes = self.at_failure();
        return bytes ? std::optional(train::format_memory(*bytes)) : std::nullopt;
      });
  module.def("memory_page", &memory_page, py::arg("engine"), py::arg("timeline"), ReleaseGil());
  module.def("memory_trace", &memory_trace, py::arg("timeline"), ReleaseGil());
}

}  // namespace tessera::python
