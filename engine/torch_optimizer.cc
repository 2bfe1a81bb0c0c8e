#include "engine/torch_optimizer.h"

#include <ATen/core/List.h>
#include <c10/util/Type.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <typeinfo>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "zero/optimizer/state_values.h"

namespace tessera {
namespace {

namespace optim = torch::optim;
using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using zero::StateValuesReader;
using zero::StateValuesWriter;

constexpr const char* kType = "$tessera";

/// Passes what is written on to what reads it.
InputArchive read_back(OutputArchive& written, at::Device device) {
  std::ostringstream stream;
  written.save_to(stream);
  const std::string bytes = std::move(stream).str();
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), device);
  return archive;
}

// ------------------------------------------------------------------------------------- archives as values

json to_values(const c10::IValue& value, const std::string& path, StateValuesWriter& writer) {
  const auto elements = [&](const auto& list) {
    json all = json::array();
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue element = list[i];
      all.push_back(to_values(element, str(path, "[", i, "]"), writer));
    }
    return all;
  };
  if (value.isNone()) return nullptr;
  if (value.isTensor()) return writer.add(value.toTensor());
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) {
    const double number = value.toDouble();
    if (std::isfinite(number)) return number;
    return {{kType, "float"}, {"value", std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
  }
  if (value.isString()) return value.toStringRef();
  if (value.isTuple()) return {{kType, "tuple"}, {"value", elements(value.toTupleRef().elements())}};
  if (value.isList()) {
    const std::string of = value.toList().elementType()->str();
    for (const char* known : {"int", "float", "bool", "str", "Tensor"})
      if (of == known) return {{kType, "list"}, {"of", of}, {"value", elements(value.toList())}};
  }
  throw Error(str(path, " is of type ", value.tagKind(),
                  " and cannot be saved; expected tensors, numbers, texts, and lists and tuples of these"));
}

json to_values(InputArchive& archive, const std::string& path, StateValuesWriter& writer) {
  json all = json::object();
  for (const std::string& key : archive.keys()) {
    const std::string inner_path = path.empty() ? key : str(path, ".", key);
    InputArchive inner;
    c10::IValue value;
    if (archive.try_read(key, inner)) {
      all[key] = {{kType, "archive"}, {"value", to_values(inner, inner_path, writer)}};
    } else {
      archive.read(key, value);
      all[key] = to_values(value, inner_path, writer);
    }
  }
  return all;
}

template <class T>
c10::IValue list_of(const std::vector<c10::IValue>& elements) {
  c10::List<T> list;
  for (const c10::IValue& element : elements) list.push_back(element.to<T>());
  return list;
}

c10::IValue to_ivalue(const JsonField& field, const StateValuesReader& reader) {
  const json& value = field.value();
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (StateValuesReader::is_tensor(field)) return reader.tensor(field);
  const JsonField type = field[kType], inner = field["value"];
  if (type.text() == "float") {
    const std::string& text = inner.text();
    const double infinity = std::numeric_limits<double>::infinity();
    return text == "nan" ? std::numeric_limits<double>::quiet_NaN() : text == "inf" ? infinity : -infinity;
  }
  std::vector<c10::IValue> elements;
  inner.for_each([&](const JsonField& element) { elements.push_back(to_ivalue(element, reader)); });
  if (type.text() == "tuple") return c10::ivalue::Tuple::create(std::move(elements));
  if (type.text() != "list") type.fail("\"tensor\", \"float\", \"tuple\" or \"list\"");
  const JsonField of = field["of"];
  try {
    if (of.text() == "int") return list_of<int64_t>(elements);
    if (of.text() == "float") return list_of<double>(elements);
    if (of.text() == "bool") return list_of<bool>(elements);
    if (of.text() == "str") return list_of<std::string>(elements);
    if (of.text() == "Tensor") return list_of<at::Tensor>(elements);
  } catch (const c10::Error&) {
    inner.fail(str("a list of ", of.text()));
  }
  of.fail("\"int\", \"float\", \"bool\", \"str\" or \"Tensor\"");
}

void to_archive(const JsonField& values, const StateValuesReader& reader, OutputArchive& archive) {
  for (const auto& item : values.value().items()) {
    const JsonField field = values[item.key()];
    if (field.value().is_object() && field[kType].value() == "archive") {
      OutputArchive inner(archive.compilation_unit());
      to_archive(field["value"], reader, inner);
      archive.write(item.key(), inner);
    } else {
      archive.write(item.key(), to_ivalue(field, reader));
    }
  }
}

/// Bytes of the tensors in the archive.
int64_t bytes_of(InputArchive& archive) {
  int64_t sum = 0;
  for (const std::string& key : archive.keys()) {
    InputArchive inner;
    c10::IValue value;
    if (archive.try_read(key, inner)) {
      sum += bytes_of(inner);
      continue;
    }
    archive.read(key, value);
    std::vector<at::Tensor> tensors;
    if (value.isTensor()) tensors = {value.toTensor()};
    if (value.isTensorList()) tensors = value.toTensorVector();
    for (const at::Tensor& tensor : tensors) sum += static_cast<int64_t>(tensor.nbytes());
  }
  return sum;
}

// --------------------------------------------------------------------------------------------- optimizer

/// An optimizer's groups have other parameters during the lifetime.
class OtherParameters {
 public:
  OtherParameters(optim::Optimizer& optimizer, std::vector<std::vector<at::Tensor>> parameters)
      : optimizer_(optimizer), kept_(std::move(parameters)) {
    swap();
  }
  ~OtherParameters() { swap(); }
  OtherParameters(const OtherParameters&) = delete;

 private:
  void swap() {
    for (size_t i = 0; i < kept_.size(); ++i) std::swap(optimizer_.param_groups()[i].params(), kept_[i]);
  }
  optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> kept_;
};

class AsItIs final : public zero::WholeOptimizer {
 public:
  AsItIs(std::shared_ptr<optim::Optimizer> optimizer, const std::vector<zero::NamedTensor>& parameters,
         bool on_one_rank, std::vector<int> group_of, bool has_schedule)
      : optimizer_(std::move(optimizer)),
        name_(c10::demangle(typeid(*optimizer_).name())),
        on_one_rank_(on_one_rank),
        group_of_(std::move(group_of)),
        writes_rates_(has_schedule) {
    for (const zero::NamedTensor& one : parameters) {
      tensors_.emplace(one.name, one.tensor);
      names_.emplace(one.tensor.unsafeGetTensorImpl(), one.name);  // a tied one: the first name
    }
    for (const optim::OptimizerParamGroup& group : optimizer_->param_groups())
      rates_.push_back(group.options().get_lr());
  }

  std::string name() const override { return name_; }
  bool on_one_rank() const override { return on_one_rank_; }

  void own(const std::vector<zero::OwnedTensor>& parameters) override {
    for (const zero::OwnedTensor& one : parameters) owned_.insert(one.tensor.unsafeGetTensorImpl());
    drop_states_of_others();
  }

  void step(const std::vector<kernels::Hyper>& groups) override {
    write_rates(groups);
    if (owned_.empty()) return;
    const OtherParameters mine(*optimizer_, owned_parameters());
    optimizer_->step();
  }

  int64_t bytes() const override {
    if (optimizer_->state().size() == measured_states_) return measured_bytes_;
    int64_t sum = 0;
    for (const auto& [parameter, state] : optimizer_->state()) {
      OutputArchive archive;
      try {
        state->serialize(archive);
      } catch (const c10::Error&) {
        continue;  // it cannot be saved, which state() says
      }
      InputArchive written = read_back(archive, at::kCPU);
      sum += bytes_of(written);
    }
    measured_states_ = optimizer_->state().size();
    return measured_bytes_ = sum;
  }

  at::Tensor state() const override {
    StateValuesWriter writer;
    json groups = json::array();
    const std::vector<std::vector<at::Tensor>> owned = owned_parameters();
    for (const std::vector<at::Tensor>& group : owned) {
      json names = json::array();
      for (const at::Tensor& tensor : group) names.push_back(names_.at(tensor.unsafeGetTensorImpl()));
      groups.push_back(names);
    }
    json archive = json::object();
    if (!owned_.empty()) {
      OutputArchive written;
      {
        const OtherParameters mine(*optimizer_, owned);
        optimizer_->save(written);
      }
      InputArchive read = read_back(written, at::kCPU);
      archive = to_values(read, "", writer);
      if (archive.empty() && !optimizer_->state().empty())
        throw Error(str(name_,
                        ": save() writes nothing, and its states cannot be saved without; expected it "
                        "to override save() and load(), as the optimizers of torch::optim do"));
    }
    return writer.finish(
        {{"torch::optim", archive}, {"groups", groups}, {"num_states", optimizer_->state().size()}});
  }

  void set_state(const std::vector<at::Tensor>& saved) override {
    std::map<void*, std::unique_ptr<optim::OptimizerParamState>> mine;
    for (const at::Tensor& of_rank : saved) {
      load_rank(of_rank);
      for (auto& [parameter, state] : optimizer_->state())
        if (owned_.contains(parameter)) mine[parameter] = std::move(state);
    }
    optimizer_->state().clear();
    for (auto& [parameter, state] : mine) optimizer_->state()[parameter] = std::move(state);
    measured_states_ = kNotMeasured;
  }

 private:
  std::vector<std::vector<at::Tensor>> owned_parameters() const {
    std::vector<std::vector<at::Tensor>> all;
    for (const optim::OptimizerParamGroup& group : optimizer_->param_groups()) {
      all.emplace_back();
      for (const at::Tensor& tensor : group.params())
        if (owned_.contains(tensor.unsafeGetTensorImpl())) all.back().push_back(tensor);
    }
    return all;
  }

  /// Adagrad has states from the beginning.
  void drop_states_of_others() {
    for (const optim::OptimizerParamGroup& group : optimizer_->param_groups())
      for (const at::Tensor& tensor : group.params())
        if (!owned_.contains(tensor.unsafeGetTensorImpl()))
          optimizer_->state().erase(tensor.unsafeGetTensorImpl());
  }

  void write_rates(const std::vector<kernels::Hyper>& groups) {
    for (size_t i = 0; i < group_of_.size(); ++i)
      if (group_of_[i] >= 0 && groups[static_cast<size_t>(group_of_[i])].lr != rates_[i])
        writes_rates_ = true;
    if (!writes_rates_) return;
    for (size_t i = 0; i < group_of_.size(); ++i)
      if (group_of_[i] >= 0)
        optimizer_->param_groups()[i].options().set_lr(groups[static_cast<size_t>(group_of_[i])].lr);
  }

  /// The optimizer's states are then those of one rank of the checkpoint.
  void load_rank(const at::Tensor& data) {
    const std::string what = str("states of ", name_);
    const StateValuesReader reader(data, what);
    const JsonField values = reader.values(), groups = values["groups"], archive = values["torch::optim"];
    optimizer_->state().clear();
    if (archive.value().empty()) return;
    std::vector<std::vector<at::Tensor>> parameters;
    groups.for_each([&](const JsonField& group) {
      parameters.emplace_back();
      group.for_each([&](const JsonField& name) {
        const auto tensor = tensors_.find(name.text());
        if (tensor == tensors_.end()) name.fail("a parameter of the model");
        parameters.back().push_back(tensor->second);
      });
    });
    if (parameters.size() != optimizer_->param_groups().size())
      groups.fail(str("the optimizer's ", optimizer_->param_groups().size(), " groups"));
    OutputArchive written;
    to_archive(archive, reader, written);
    InputArchive read = read_back(written, tensors_.begin()->second.device());
    try {
      const OtherParameters theirs(*optimizer_, std::move(parameters));
      optimizer_->load(read);
    } catch (const c10::Error& error) {
      throw Error(str(what, ": ", error.what_without_backtrace()));
    }
    const int64_t expected = values["num_states"].integer(0);
    if (static_cast<int64_t>(optimizer_->state().size()) != expected)
      throw Error(str(what, ": load() has restored ", optimizer_->state().size(), " of ", expected,
                      "; expected it to take what save() writes"));
  }

  static constexpr size_t kNotMeasured = static_cast<size_t>(-1);

  std::shared_ptr<optim::Optimizer> optimizer_;
  std::string name_;
  bool on_one_rank_;
  std::vector<int> group_of_;
  std::vector<double> rates_;  ///< by group of the optimizer, at the start
  bool writes_rates_;
  std::map<std::string, at::Tensor> tensors_;
  std::map<void*, std::string> names_;
  std::set<void*> owned_;
  mutable size_t measured_states_ = kNotMeasured;
  mutable int64_t measured_bytes_ = 0;
};

}  // namespace

std::shared_ptr<zero::WholeOptimizer> run_as_it_is(std::shared_ptr<optim::Optimizer> optimizer,
                                                   const std::vector<zero::NamedTensor>& parameters,
                                                   bool on_one_rank, std::vector<int> group_of,
                                                   bool has_schedule) {
  return std::make_shared<AsItIs>(std::move(optimizer), parameters, on_one_rank, std::move(group_of),
                                  has_schedule);
}

}  // namespace tessera
