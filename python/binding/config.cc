// What surrounds an engine: EngineConfig, read strictly from a ds_config.json or the JSON of a dict, the
// memory it means for a model, and the training order.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/torch_dtype.h"
#include "core/log.h"
#include "engine/config/document/document.h"
#include "engine/config/keys.h"
#include "engine/config/parse.h"
#include "engine/config/sharding_plan.h"
#include "engine/optimizer/optimizer_setup.h"
#include "python/binding/bindings.h"
#include "train/task/sampler.h"
#include "zero/optimizer/sharded_optimizer.h"
#include "zero/optimizer/whole_formula.h"
#include "zero/plan/layout.h"
#include "zero/plan/memory_model.h"
#include "zero/plan/stage.h"

namespace tessera::python {
namespace {

namespace py = pybind11;

/// The configuration, its warnings, and the keys that were given at the top. In Python, as in DeepSpeed, no
/// progress line is printed unless `steps_per_print` is given.
std::tuple<EngineConfig, std::vector<std::string>, std::vector<std::string>> read_config(
    const std::string& file_or_json, bool is_file, int world_size, const std::vector<std::string>& overrides,
    const std::string& override_source) {
  config::ConfigReport report;
  const ConfigOptions options{.world_size = world_size,
                              .overrides = overrides,
                              .override_source = override_source,
                              .report = &report};
  EngineConfig config =
      is_file ? load_engine_config(file_or_json, options) : parse_engine_config(file_or_json, options);
  if (std::find(report.given.begin(), report.given.end(), "steps_per_print") == report.given.end())
    config.steps_per_print = 0;
  return {std::move(config), std::move(report.warnings), std::move(report.given)};
}

/// A file of a configuration as JSON text, with the keys as they are written in it.
std::string read_document(const std::string& file) { return config::read_document(file).json->dump(); }

using Parameter = std::tuple<std::string, std::vector<int64_t>, at::ScalarType, bool>;

/// Bytes of a rank's model state by kind, in all tiers together, at a stage.
std::map<std::string, int64_t> state_bytes(const EngineConfig& given,
                                           const std::vector<Parameter>& parameters, int world_size,
                                           int stage) {
  const EngineConfig config = at_stage(given, stage, world_size);
  const ShardingPlan plan = plan_sharding(config, world_size, /*device_memory_is_separate=*/false);
  const OptimizerSetup optimizer = set_up_optimizer(config.optimizer);
  std::vector<zero::ParameterSpec> specs;
  for (const auto& [name, shape, dtype, trainable] : parameters)
    specs.push_back({.name = name,
                     .shape = shape,
                     .dtype = dtype_in_unit(from_torch(dtype), plan.compute),
                     .trainable = trainable,
                     .group = optimizer.group_of(name),
                     .aliases = {}});
  const zero::Layout layout(specs, zero::LayoutOptions{world_size, plan.unit_numel});
  const zero::StateBytes bytes = zero::model_state_bytes(
      layout, {.sharding = plan.sharding,
               .accumulate_dtype = plan.accumulate,
               .num_states = static_cast<int>(
                   zero::state_names_of({.kind = optimizer.kind, .groups = optimizer.groups}).size()),
               .async_checkpoints = config.checkpoint.async && !plan.tiers.any_below_device(),
               .groups = plan.groups});
  std::map<std::string, int64_t> kinds = {
      {"parameters", bytes.parameters},
      {"gradients", bytes.gradients},
      {"master", bytes.master},
      {"optimizer",
       bytes.optimizer + zero::most_owned_state_bytes(optimizer.kind, optimizer.groups, layout)}};
  if (config.checkpoint.async) kinds["snapshot"] = bytes.snapshot;
  return kinds;
}

/// By name, the index of the parameter's group: 0, or that of an element of optimizer.param_groups plus 1.
std::vector<int> group_indices(const EngineConfig& config, const std::vector<std::string>& names) {
  const OptimizerSetup optimizer = set_up_optimizer(config.optimizer);
  std::vector<int> indices;
  for (const std::string& name : names) indices.push_back(optimizer.group_of(name));
  return indices;
}

/// Halves of surrogate pairs, such as those of a file's name that is not UTF-8, are written as \udcff.
std::string printable(const py::str& line) {
  PyObject* const bytes = PyUnicode_AsEncodedString(line.ptr(), "utf-8", "backslashreplace");
  if (bytes == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

train::TrainSampler make_sampler(int64_t num_samples, int64_t micro_batch, int64_t accumulation_steps,
                                 int world_size, int rank, uint64_t seed) {
  return {num_samples, {micro_batch, accumulation_steps, world_size, rank}, seed};
}

}  // namespace

void bind_config(py::module_& module) {
  py::class_<EngineConfig>(module, "Config").def_property_readonly("resolved", &dump_resolved);
  module.def("read_config", &read_config, py::arg("file_or_json"), py::arg("is_file"), py::arg("world_size"),
             py::arg("overrides"), py::arg("override_source") = "overrides=");
  module.def("read_document", &read_document, py::arg("file"));
  module.def("group_indices", &group_indices, py::arg("config"), py::arg("names"));
  module.def(
      "log_info", [](const py::str& line) { Logger(LogOptions{}).info(printable(line)); }, py::arg("line"));
  module.def(
      "log_warning", [](const py::str& line) { Logger(LogOptions{}).warning(printable(line)); },
      py::arg("line"));
  py::class_<train::TrainSampler>(module, "TrainSampler")
      .def(py::init(&make_sampler), py::arg("num_samples"), py::arg("micro_batch"),
           py::arg("accumulation_steps"), py::arg("world_size"), py::arg("rank"), py::arg("seed"))
      .def_property_readonly("steps_per_epoch", &train::TrainSampler::steps_per_epoch)
      .def("set_epoch", &train::TrainSampler::set_epoch, py::arg("epoch"))
      .def(
          "slice",
          [](const train::TrainSampler& self, int64_t first, int64_t micro_step) {
            return self.slice(first, micro_step).indices;
          },
          py::arg("first"), py::arg("micro_step"));
  module.def("state_bytes", &state_bytes, py::arg("config"), py::arg("parameters"), py::arg("world_size"),
             py::arg("stage"));
}

}  // namespace tessera::python
