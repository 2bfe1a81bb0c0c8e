// PyEngine and GatheredParameters for tessera.engine and tessera.zero.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "activations/checkpointing.h"
#include "activations/chunked_loss.h"
#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "engine/config/parse.h"
#include "engine/optimizer/optimizer_setup.h"
#include "python/binding/bindings.h"
#include "python/binding/python_engine.h"
#include "zero/deferred/deferred_model.h"
#include "zero/deferred/operator_log.h"
#include "zero/gather/operator_listener.h"
#include "zero/gathered_parameters.h"
#include "zero/kernels/kernels.h"
#include "zero/memory/unit_memory.h"
#include "zero/optimizer/whole_formula.h"
#include "zero/plan/stage.h"

namespace tessera::python {
namespace {

namespace py = pybind11;
using nlohmann::json;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<zero::NamedTensor> named_tensors(const Named& pairs) {
  std::vector<zero::NamedTensor> tensors;
  for (const auto& [name, tensor] : pairs) tensors.push_back({name, tensor});
  return tensors;
}

/// An object of Python whose members C++ calls. Each call takes the GIL itself, and so does the destructor.
class PythonObject {
 public:
  explicit PythonObject(py::object object) : object_(std::move(object)) {}
  ~PythonObject() {
    const py::gil_scoped_acquire held;
    object_ = py::object();
  }
  PythonObject(const PythonObject&) = delete;

  template <class Result>
  Result get(const char* attribute) const {
    const py::gil_scoped_acquire held;
    return object_.attr(attribute).cast<Result>();
  }
  template <class Result = void, class... Args>
  Result call(const char* method, const Args&... args) const {
    const py::gil_scoped_acquire held;
    return object_.attr(method)(args...).template cast<Result>();
  }

 private:
  py::object object_;
};

/// An object of Python with ModuleState's members (tessera.module_state.ModuleState), which holds a weak
/// reference to the module.
class PyModuleState final : public zero::ModuleState {
 public:
  explicit PyModuleState(py::object state) : state_(std::move(state)) {}

  std::vector<zero::NamedBuffer> buffers() const override {
    std::vector<zero::NamedBuffer> buffers;
    for (auto& [name, tensor, persistent] :
         state_.call<std::vector<std::tuple<std::string, std::optional<at::Tensor>, bool>>>("buffers"))
      buffers.push_back({name, tensor.value_or(at::Tensor()), persistent});
    return buffers;
  }
  bool can_assign(const std::string& name) const override { return state_.call<bool>("can_assign", name); }
  void assign(const std::string& name, const at::Tensor& tensor) override {
    state_.call("assign", name, tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  void remove(const std::string& name) override { state_.call("remove", name); }
  std::vector<std::string> extra_state_names() const override {
    return state_.call<std::vector<std::string>>("extra_state_names");
  }
  at::Tensor extra_state() const override { return state_.call<at::Tensor>("extra_state"); }
  void set_extra_state(const at::Tensor& bytes) override { set("set_extra_state", bytes); }
  void set_extra_state(const std::string& name, const at::Tensor& value) override {
    set("set_extra_state_of", name, value);
  }

 private:
  /// Throws CheckpointError with the error's text alone.
  template <class... Args>
  void set(const char* method, const Args&... args) const try {
    state_.call(method, args...);
  } catch (const py::error_already_set& error) {
    const py::gil_scoped_acquire held;
    throw CheckpointError(std::string(py::str(error.value())));
  }

  PythonObject state_;
};

/// An object of Python with WholeOptimizer's members (tessera.whole_optimizer.WholeOptimizer).
class PyWholeOptimizer final : public zero::WholeOptimizer {
 public:
  /// `configured`: the configuration's optimizer, which this is if it is one that runs on whole parameters.
  PyWholeOptimizer(py::object optimizer, kernels::OptimizerKind configured)
      : optimizer_(std::move(optimizer)) {
    if (kernels::updates_whole_parameters(configured)) formula_ = configured;
  }

  std::string name() const override { return optimizer_.get<std::string>("name"); }
  bool on_one_rank() const override { return optimizer_.get<bool>("on_one_rank"); }
  void own(const std::vector<zero::OwnedTensor>& parameters) override {
    std::vector<std::string> names;
    for (const zero::OwnedTensor& one : parameters) {
      names.push_back(one.spec->name);
      owned_.push_back(one.spec);
    }
    optimizer_.call("own", names);
  }
  void step(const std::vector<kernels::Hyper>&) override { optimizer_.call("step"); }
  double digest() const override { return optimizer_.call<double>("digest"); }
  std::string first_difference() override { return optimizer_.call<std::string>("first_difference"); }
  int64_t bytes() const override { return optimizer_.call<int64_t>("bytes"); }
  int64_t formula_bytes(const std::vector<kernels::Hyper>& groups) const override {
    int64_t sum = 0;
    if (!formula_) return sum;
    for (const zero::ParameterSpec* one : owned_)  // and the step, which is a tensor there
      sum += zero::formula_state_bytes(*formula_, groups[static_cast<size_t>(one->group)], *one) + 4;
    return sum;
  }
  at::Tensor state() const override { return optimizer_.call<at::Tensor>("state_bytes"); }
  void check_state_of_another_program(const at::Tensor& saved) const override {
    optimizer_.call("check_state_of_another_program", saved);
  }
  void set_state(const std::vector<at::Tensor>& saved, const zero::NamesInCheckpoint* names) override {
    optimizer_.call("set_state_bytes", saved, names == nullptr ? std::nullopt : std::optional(*names));
  }

 private:
  PythonObject optimizer_;
  std::optional<kernels::OptimizerKind> formula_;
  std::vector<const zero::ParameterSpec*> owned_;
};

/// zero::adamw_8bit for tessera.optim. Returns the states.
zero::FormulaStates adamw_8bit(const at::Tensor& weights, const at::Tensor& gradient,
                               zero::FormulaStates states, int64_t step, const std::string& name, double lr,
                               double beta1, double beta2, double eps, double weight_decay,
                               int64_t optim_bits, int64_t min_8bit_size) {
  const kernels::Hyper hyper{.lr = lr,
                             .beta1 = beta1,
                             .beta2 = beta2,
                             .eps = eps,
                             .weight_decay = weight_decay,
                             .optim_bits = optim_bits,
                             .min_8bit_size = min_8bit_size};
  zero::adamw_8bit(weights, gradient, states, hyper, step,
                   zero::is_embedding({.name = name, .shape = {}, .aliases = {}}));
  return states;
}

/// `members`: what the module holds besides, by its name: tensors that are views of parameters are refused.
/// `state`, `whole_optimizer`: see PyModuleState and PyWholeOptimizer; the latter may be None.
std::unique_ptr<PyEngine> make_engine(const Named& parameters, const py::object& state, const Named& members,
                                      const EngineConfig& config, const comm::CommunicatorPtr& comm,
                                      int local_rank, int64_t steps_per_epoch, zero::DeferredModel* deferred,
                                      const std::vector<std::string>& untrained,
                                      const py::object& whole_optimizer) {
  zero::ModelView view;
  view.deferred = deferred;
  view.parameters = named_tensors(parameters);
  view.state = std::make_shared<PyModuleState>(state);
  view.members_searched = true;
  InitOptions options;
  if (!whole_optimizer.is_none())
    options.whole_optimizer =
        std::make_shared<PyWholeOptimizer>(whole_optimizer, set_up_optimizer(config.optimizer).kind);
  const py::gil_scoped_release released;
  zero::refuse_views(view.parameters, named_tensors(members));
  options.device = comm->device();
  options.local_rank = local_rank;
  options.steps_per_epoch = steps_per_epoch;
  options.untrained = untrained;
  options.autograd_hooks = false;  // Python's own engine has their place: engine.py pushes hooks
  options.caller_reports = true;   // reports.py
  if (comm->rank() == 0) options.log = Logger(LogOptions{});
  return std::make_unique<PyEngine>(view, config, comm, options);
}

/// Calls `make`, a function of Python, which may be called twice. The GIL is let go where other threads that
/// make models are waited for. A KeyboardInterrupt and the like end it at once.
void make_deferred(zero::DeferredModel& self, const py::function& make) {
  std::exception_ptr interrupt;
  const py::gil_scoped_release released;
  self.make([&] {
    const py::gil_scoped_acquire held;
    if (interrupt) std::rethrow_exception(interrupt);
    try {
      make();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) interrupt = std::current_exception();
      throw;
    }
  });
}

void bind_deferred_model(py::module_& module) {
  py::class_<zero::DeferredModel>(module, "DeferredModel")
      .def(py::init([](bool warns) {
             return std::make_unique<zero::DeferredModel>(warns ? Logger(LogOptions{}) : Logger());
           }),
           py::arg("warns"))
      .def("make", &make_deferred, py::arg("make"))
      .def_property_readonly("counts", [](const zero::DeferredModel& self) {
        const zero::MakingCounts counts = self.counts();
        return std::tuple(counts.whole, counts.num_recorded, counts.num_run, counts.num_drawn);
      });
}

/// What a checkpoint brings: its path, client state (JSON), what was not loaded, and
/// LoadedCheckpoint::saved_by.
std::tuple<std::string, std::string, std::vector<std::string>, std::string> load_checkpoint(
    PyEngine& self, const std::string& directory, const std::string& tag, bool strict,
    bool load_optimizer_states, bool load_lr_scheduler_states, bool load_module_only, bool allow_partial_load,
    const std::vector<std::vector<std::string>>& optimizer_groups, const py::function& not_taken_over) {
  LoadOptions options;
  options.allow_partial_load = allow_partial_load;
  options.not_taken_over = [&](const nlohmann::json& client_state, std::optional<int64_t> schedule_steps,
                               const std::vector<checkpoint::LostValue>& lost) {
    using Kind = checkpoint::LostValue::Kind;
    std::vector<std::tuple<bool, std::string, std::string>> values;  // whether it is the schedule's
    for (const checkpoint::LostValue& one : lost)
      if (one.kind == Kind::kOption || one.kind == Kind::kSchedule)
        values.emplace_back(one.kind == Kind::kSchedule, one.name, one.line);
    const py::gil_scoped_acquire gil;
    try {
      return not_taken_over(client_state.dump(), schedule_steps, values).cast<std::vector<std::string>>();
    } catch (const py::error_already_set& error) {
      throw CheckpointError(std::string(py::str(error.value())));  // what() has the traceback
    }
  };
  options.partial_advice =
      "allow_partial_load=True goes on without, load_optimizer_states=False and "
      "load_lr_scheduler_states=False "
      "leave all of theirs as it is";
  options.optimizer_groups = optimizer_groups;
  options.strict = strict;
  options.load_optimizer_states = load_optimizer_states;
  options.load_lr_scheduler_states = load_lr_scheduler_states;
  options.load_module_only = load_module_only;
  options.optimizer_advice =
      "give the optimizer that it was saved with, or load_optimizer_states=False, which leaves the "
      "optimizer's "
      "states as they are";
  options.advice =
      "load_module_strict=False loads what fits, and load_optimizer_states=False leaves the optimizer as it "
      "is";
  LoadedCheckpoint loaded = self.load_checkpoint(directory, tag, options);
  return {loaded.path, loaded.client_state.dump(), std::move(loaded.not_loaded), loaded.saved_by};
}

std::string save_checkpoint(PyEngine& self, const std::string& directory, const std::string& tag,
                            const std::string& client_state, bool save_latest,
                            bool exclude_frozen_parameters) {
  nlohmann::json client;
  try {
    client = parse_json(client_state);
  } catch (const JsonError& error) {
    throw CheckpointError("cannot save client_state: ", error.what());
  }
  return self.save_checkpoint(
      directory, tag, client,
      {.save_latest = save_latest, .exclude_frozen_parameters = exclude_frozen_parameters});
}

/// By param group, the hyper-parameters of the next update by their names in visit_options().
std::vector<py::dict> hypers(const PyEngine& self) {
  std::vector<py::dict> groups;
  for (const kernels::Hyper& hyper : self.next_groups())
    visit_options(hyper, [&options = groups.emplace_back()]<class T>(const char* name, const T& value) {
      if constexpr (!std::is_enum_v<T>) options[name] = value;
    });
  return groups;
}

/// By param group, the names of its parameters.
std::vector<std::vector<std::string>> group_parameters(PyEngine& self) {
  std::vector<std::vector<std::string>> names(self.sharded_model().optimizer().groups().size());
  for (const zero::ParameterSpec& parameter : self.sharded_model().layout().parameters())
    if (parameter.trainable) names.at(parameter.group).push_back(parameter.name);
  return names;
}

/// Sets some hyper-parameters for the next updates, by the names that hypers() has. Rates have a function of
/// their own: a schedule may change them.
void set_hyper(PyEngine& self, size_t group, const py::dict& options) {
  kernels::Hyper hyper = self.sharded_model().optimizer().groups().at(group);
  visit_options(hyper, [&]<class T>(const char* name, T& value) {
    if constexpr (!std::is_enum_v<T>) {
      if (!options.contains(name)) return;
      try {
        value = options[name].cast<T>();
      } catch (const py::cast_error&) {
        throw Error(name, " is ", std::string(py::repr(options[name])), "; expected a value such as ", value);
      }
    }
  });
  self.set_hyper(group, hyper);
}

/// The names of the parameters that Muon updates.
std::vector<std::string> muon_parameters(PyEngine& self) {
  const zero::ShardedModel& model = self.sharded_model();
  std::vector<std::string> names;
  for (size_t i = 0; i < model.optimizer().by_muon().size(); ++i)
    if (model.optimizer().by_muon()[i]) names.push_back(model.layout().parameters()[i].name);
  return names;
}

/// The optimizer's states of a unit's parameters, by name: how many updates each has had, and the states on
/// the CPU, in the order of `state_names`.
std::map<std::string, std::pair<int64_t, std::vector<at::Tensor>>> optimizer_states(PyEngine& self,
                                                                                    int unit) {
  zero::ShardedModel& model = self.sharded_model();
  model.check_usable();
  const std::vector<int>& parameters = model.layout().units().at(unit).parameters;
  std::vector<std::vector<at::Tensor>> states = model.full_states(unit);
  std::map<std::string, std::pair<int64_t, std::vector<at::Tensor>>> found;
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (at::Tensor& state : states[i]) state = state.cpu();
    found[model.layout().parameters()[parameters[i]].name] = {model.optimizer().steps(parameters[i]),
                                                              std::move(states[i])};
  }
  return found;
}

void set_optimizer_states(PyEngine& self, const std::string& name, const std::vector<at::Tensor>& states,
                          int64_t num_updates) {
  self.sharded_model().check_usable();
  self.sharded_model().set_states(name, states, num_updates);
}

/// The names of the parameters in each unit: what one GatheredParameters holds at the least.
std::vector<std::vector<std::string>> units(PyEngine& self) {
  const zero::Layout& layout = self.sharded_model().layout();
  std::vector<std::vector<std::string>> names;
  for (const zero::UnitSpec& unit : layout.units()) {
    names.emplace_back();
    for (const int parameter : unit.parameters) names.back().push_back(layout.parameters()[parameter].name);
  }
  return names;
}

std::map<std::string, int64_t> by_kind(const zero::StateBytes& bytes) {
  return {{"parameters", bytes.parameters}, {"gradients", bytes.gradients}, {"master", bytes.master},
          {"optimizer", bytes.optimizer},   {"snapshot", bytes.snapshot},   {"total", bytes.total()}};
}

/// Whether a parameter's unit was released: its values are neither here nor on their way.
bool is_released(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const zero::UnitHandle* const unit = zero::find_unit(storage);
  return unit != nullptr && !unit->buffer.defined() &&
         storage._mutable_data_ptr_no_checks().get() == unit->guard->data();
}

void bind_gathered_parameters(py::module_& module) {
  py::class_<zero::GatheredParameters>(module, "GatheredParameters")
      .def(py::init([](PyEngine& engine, const std::vector<std::string>& names,
                       std::optional<int> modifier_rank) {
             return std::make_unique<zero::GatheredParameters>(engine.sharded_model(), names, modifier_rank);
           }),
           py::arg("engine"), py::arg("names"), py::arg("modifier_rank"), py::keep_alive<1, 2>(),
           ReleaseGil())
      .def("close", &zero::GatheredParameters::close, ReleaseGil())
      .def("abandon", &zero::GatheredParameters::abandon, ReleaseGil());
}

/// A context manager for tessera.compiled_graphs: a graph runs inside of it. Used once.
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

void bind_compiled_graphs(py::module_& module) {
  py::class_<GraphRead>(module, "CompiledGraphRead")
      .def(py::init<const py::sequence&>(), py::arg("inputs"))
      .def("__enter__", &GraphRead::enter)
      .def("__exit__", [](GraphRead& self, const py::args&) { self.exit(); });
}

/// What stands for a tensor that autograd saves: see _saved_tensors_hooks in engine.py.
void bind_saved_tensors(py::module_& module) {
  using activations::SavedTensor;
  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(module, "SavedTensor")
      .def("unpack", &SavedTensor::unpack, ReleaseGil());
  module.def(
      "save_tensor",
      [](const at::Tensor& tensor) {
        std::shared_ptr<SavedTensor> saved = activations::save_on_this_thread(tensor);
        return saved ? saved : std::make_shared<SavedTensor>(nullptr, tensor);
      },
      py::arg("tensor"));
}

void bind_chunked_loss(py::module_& module) {
  module.def(
      "chunked_cross_entropy",
      [](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
         const std::optional<at::Tensor>& bias, int64_t chunk_rows, int64_t ignore_index) {
        return chunked_cross_entropy(hidden, weight, bias.value_or(at::Tensor()), target,
                                     {.chunk_rows = chunk_rows, .ignore_index = ignore_index});
      },
      py::arg("hidden"), py::arg("weight"), py::arg("target"), py::arg("bias"), py::arg("chunk_rows"),
      py::arg("ignore_index"), ReleaseGil());
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_saved_tensors(module);
  bind_chunked_loss(module);
  bind_deferred_model(module);
  py::class_<PyEngine> engine(module, "Engine");
  bind_gathered_parameters(module);
  bind_compiled_graphs(module);
  module.def("is_released", &is_released, py::arg("tensor"));
  module.def("adamw_8bit", &adamw_8bit, py::arg("weights"), py::arg("gradient"), py::arg("states"),
             py::arg("step"), py::arg("name"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
             py::arg("eps"), py::arg("weight_decay"), py::arg("optim_bits"), py::arg("min_8bit_size"),
             ReleaseGil());
  module.def(
      "take_8bit_states",
      [](const std::vector<int64_t>& shape, zero::FormulaStates states) {
        std::string problem =
            zero::problem_of_8bit_states({.name = {}, .shape = shape, .aliases = {}}, states);
        return std::pair(std::move(states), std::move(problem));
      },
      py::arg("shape"), py::arg("states"));
  module.def("hash_of", &zero::deferred::hash_of, py::arg("tensor"), ReleaseGil());
  engine
      .def(py::init(&make_engine), py::arg("parameters"), py::arg("state"), py::arg("members"),
           py::arg("config"), py::arg("comm"), py::arg("local_rank"), py::arg("steps_per_epoch"),
           py::arg("deferred"), py::arg("untrained"), py::arg("whole_optimizer"))
      // the step
      .def("prepare", &PyEngine::prepare_tensor, py::arg("tensor"), ReleaseGil())
      .def("begin_forward", &PyEngine::begin_forward, ReleaseGil())
      .def("end_forward", &PyEngine::end_forward, py::arg("results"), ReleaseGil())
      .def("leave_forward", &PyEngine::leave_forward, ReleaseGil())
      .def_property_readonly("in_forward", &PyEngine::in_forward)
      .def("backward", &PyEngine::backward, py::arg("loss"), py::arg("average"), ReleaseGil())
      .def("scale", &PyEngine::scale, py::arg("loss"), ReleaseGil())
      .def("step", &PyEngine::step, ReleaseGil())
      .def("reduce_accumulated", &PyEngine::reduce_accumulated, ReleaseGil())
      .def("zero_grad", &PyEngine::zero_grad, ReleaseGil())
      .def_property_readonly("update_is_due", &PyEngine::update_is_due)
      .def_property_readonly("training", [](PyEngine& self) { return self.sharded_model().training(); })
      .def("train", &PyEngine::train, ReleaseGil())
      .def("eval", &PyEngine::eval, ReleaseGil())
      .def_property_readonly("has_failed", &PyEngine::has_failed)
      .def_property_readonly("has_gradients", &PyEngine::has_gradients)
      .def_property_readonly(
          "step_was_refused",  // by an optimizer that runs as it is, and zero_grad() drops it
          [](PyEngine& self) {
            const zero::WholeParameters* const whole = self.sharded_model().optimizer().whole();
            return whole != nullptr && whole->was_refused();
          })
      .def_property_readonly("is_boundary", &PyEngine::is_gradient_accumulation_boundary)
      .def("set_boundary", &PyEngine::set_gradient_accumulation_boundary, py::arg("is_boundary"))
      .def("begin_no_sync", &PyEngine::begin_no_sync)
      .def("end_no_sync", &PyEngine::end_no_sync, py::arg("next_is_last"))
      .def_property_readonly("in_no_sync", &PyEngine::in_no_sync)
      .def(
          "check_usable", [](PyEngine& self) { self.sharded_model().check_usable(); }, ReleaseGil())
      .def(
          "check_same_parameters",
          [](PyEngine& self, const Named& now) { self.check_same_parameters(named_tensors(now)); },
          py::arg("now"))
      .def_property_readonly("recomputes", [](const PyEngine& self) { return self.activations() != nullptr; })
      .def("activation_counts",
           [](const PyEngine& self) {
             const activations::Checkpointing* activations = self.activations();
             const activations::Counts counts = activations ? activations->counts() : activations::Counts{};
             return std::map<std::string, int64_t>{
                 {"kept_bytes", counts.kept_bytes},
                 {"dropped_bytes", counts.dropped_bytes},
                 {"num_kept", counts.num_kept},
                 {"num_dropped", counts.num_dropped},
                 {"num_repeated", counts.work.num_calls},
                 {"num_verified", counts.work.num_verified},
                 {"repeat_us", static_cast<int64_t>(1e6 * counts.work.call_seconds)},
                 {"read_us", static_cast<int64_t>(1e6 * counts.work.read_seconds)},
                 {"offloaded_bytes", counts.offloaded_bytes},
                 {"num_offloaded", counts.num_offloaded}};
           })
      // rates
      .def_property_readonly("learning_rates", &PyEngine::learning_rates)
      .def("hypers", &hypers)
      .def("group_parameters", &group_parameters)
      .def("set_hyper", &set_hyper, py::arg("group"), py::arg("options"))
      .def("set_learning_rates", &PyEngine::set_learning_rates, py::arg("rates"))
      .def("use_configured_rates", &PyEngine::use_configured_rates)
      // the optimizer's state
      .def_property_readonly("state_names",
                             [](PyEngine& self) { return self.sharded_model().optimizer().state_names(); })
      .def_property_readonly("muon_parameters", &muon_parameters)
      .def(
          "num_updates",
          [](PyEngine& self, const std::string& name) {
            zero::ShardedModel& model = self.sharded_model();
            return model.optimizer().steps(model.layout().find(name));
          },
          py::arg("name"))
      .def("optimizer_states", &optimizer_states, py::arg("unit"), ReleaseGil())
      .def("set_optimizer_states", &set_optimizer_states, py::arg("name"), py::arg("states"),
           py::arg("num_updates"), ReleaseGil())
      // the whole model
      .def("full_parameter", &PyEngine::full_parameter, py::arg("name"), ReleaseGil())
      .def("full_gradient", &PyEngine::full_gradient, py::arg("name"), ReleaseGil())
      .def("set_full_parameter", &PyEngine::set_full_parameter, py::arg("name"), py::arg("value"),
           ReleaseGil())
      .def("set_full_gradient", &PyEngine::set_full_gradient, py::arg("name"), py::arg("value"), ReleaseGil())
      .def(
          "apply_to_whole",
          [](PyEngine& self, const py::function& function) {
            const py::gil_scoped_release released;
            self.apply_to_whole([&] {
              const py::gil_scoped_acquire held;
              function();
            });
          },
          py::arg("function"))
      .def("units", &units)
      .def("save_model", &PyEngine::save_model, py::arg("path"), py::arg("tensors"), ReleaseGil())
      .def(
          "load_weights",
          [](PyEngine& self, const std::string& path, const std::vector<std::string>& ignore_missing,
             const std::vector<std::string>& ignore_unexpected,
             const std::vector<std::pair<std::string, std::string>>& renamed) {
            self.load_weights(path, {.base_model_prefix = {},
                                     .ignore_missing = ignore_missing,
                                     .ignore_unexpected = ignore_unexpected,
                                     .renamed_prefixes = renamed});
          },
          py::arg("path"), py::arg("ignore_missing"), py::arg("ignore_unexpected"), py::arg("renamed"),
          ReleaseGil())
      .def(
          "broadcast_buffers", [](PyEngine& self) { self.sharded_model().broadcast_buffers(); }, ReleaseGil())
      // checkpoints
      .def("save_checkpoint", &save_checkpoint, py::arg("directory"), py::arg("tag"), py::arg("client_state"),
           py::arg("save_latest"), py::arg("exclude_frozen_parameters"), ReleaseGil())
      .def("load_checkpoint", &load_checkpoint, py::arg("directory"), py::arg("tag"), py::arg("strict"),
           py::arg("load_optimizer_states"), py::arg("load_lr_scheduler_states"), py::arg("load_module_only"),
           py::arg("allow_partial_load"), py::arg("optimizer_groups"), py::arg("not_taken_over"),
           ReleaseGil())
      .def("finish_checkpoint", &PyEngine::finish_checkpoint, ReleaseGil())
      // numbers
      .def_property_readonly("global_steps", &PyEngine::global_steps)
      .def_property_readonly("flops_per_step",
                             [](const PyEngine& engine) {
                               return engine.flops() ? std::optional(engine.flops()->total()) : std::nullopt;
                             })
      .def_property_readonly("skipped_steps", &PyEngine::skipped_steps)
      .def_property_readonly("micro_steps", &PyEngine::micro_steps)
      .def_property_readonly("schedule_steps", &PyEngine::schedule_steps)
      .def("set_schedule_steps", &PyEngine::set_schedule_steps, py::arg("steps"))
      .def_property_readonly("loss_scale", &PyEngine::loss_scale)
      .def_property_readonly("gradient_norm", &PyEngine::gradient_norm)
      .def_property_readonly("config", [](const PyEngine& self) { return dump_resolved(self.config()); })
      .def_property_readonly("shards_parameters",
                             [](PyEngine& self) { return self.sharded_model().residency().gathers_on_use(); })
      .def("measured_bytes", [](const PyEngine& self) { return by_kind(self.measured_bytes()); })
      .def("formula_bytes", [](const PyEngine& self) { return by_kind(self.formula_bytes()); });
}

}  // namespace tessera::python
