#include "engine/torch_optimizer.h"

#include <ATen/core/List.h>
#include <c10/util/Type.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "checkpoint/value_tag.h"
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

/// Whether libtorch may write the key into an archive. It stands there in a text that is compiled when the
/// archive is read, and is not escaped.
bool is_harmless(const std::string& key) {
  return !key.empty() && std::ranges::all_of(key, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '/';
  });
}

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
    return {{checkpoint::kValueTag, "float"},
            {"value", std::isnan(number) ? "nan"
                      : number > 0       ? "inf"
                                         : "-inf"}};
  }
  if (value.isString()) return value.toStringRef();
  if (value.isTuple())
    return {{checkpoint::kValueTag, "tuple"}, {"value", elements(value.toTupleRef().elements())}};
  if (value.isList()) {
    const std::string of = value.toList().elementType()->str();
    for (const char* known : {"int", "float", "bool", "str", "Tensor"})
      if (of == known)
        return {{checkpoint::kValueTag, "list"}, {"of", of}, {"value", elements(value.toList())}};
  }
  throw Error(path, " is of type ", value.tagKind(),
              " and cannot be saved; expected tensors, numbers, texts, and lists and tuples of these");
}

json to_values(InputArchive& archive, const std::string& path, StateValuesWriter& writer) {
  json all = json::object();
  for (const std::string& key : archive.keys()) {
    const std::string inner_path = path.empty() ? key : str(path, ".", key);
    if (!is_harmless(key))
      throw Error("save() has written the key ", inner_path, "; expected letters, digits, '_' and '/'");
    InputArchive inner;
    c10::IValue value;
    if (archive.try_read(key, inner)) {
      all[key] = {{checkpoint::kValueTag, "archive"}, {"value", to_values(inner, inner_path, writer)}};
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
  const JsonField type = field[checkpoint::kValueTag], inner = field["value"];
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
    if (!is_harmless(item.key())) values.complain("has a key that save() of an optimizer does not write");
    const JsonField field = values[item.key()];
    if (field.value().is_object() && field[checkpoint::kValueTag].value() == "archive") {
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

class WholeTorchOptimizer final : public zero::WholeOptimizer {
 public:
  WholeTorchOptimizer(std::shared_ptr<optim::Optimizer> optimizer,
                      const std::vector<zero::NamedTensor>& parameters, bool on_one_rank,
                      std::vector<int> group_of)
      : optimizer_(std::move(optimizer)),
        name_(c10::demangle(typeid(*optimizer_).name())),
        on_one_rank_(on_one_rank),
        group_of_(std::move(group_of)) {
    for (const zero::NamedTensor& one : parameters) {
      tensors_.emplace(one.name, one.tensor);
      names_.emplace(one.tensor.unsafeGetTensorImpl(), one.name);  // a tied one: the first name
    }
  }

  std::string name() const override { return name_; }
  bool on_one_rank() const override { return on_one_rank_; }

  void own(const std::vector<zero::OwnedTensor>& parameters) override {
    for (const zero::OwnedTensor& one : parameters) owned_.insert(one.tensor.unsafeGetTensorImpl());
    drop_states_of_others();
    const bool on_cpu = parameters.empty() || parameters.front().tensor.is_cpu();
    if (!on_cpu && !optimizer_->state().empty())
      set_state({state()}, nullptr);  // made where the model was before
  }

  void step(const std::vector<kernels::Hyper>& groups) override {
    for (size_t i = 0; i < group_of_.size(); ++i)
      if (group_of_[i] >= 0)
        optimizer_->param_groups()[i].options().set_lr(groups[static_cast<size_t>(group_of_[i])].lr);
    if (owned_.empty()) return;
    const OtherParameters mine(*optimizer_, owned_parameters());
    optimizer_->step();
  }

  std::vector<double> rates() const override {
    std::vector<double> rates;
    for (size_t i = 0; i < group_of_.size(); ++i)
      if (group_of_[i] >= 0) rates.push_back(optimizer_->param_groups()[i].options().get_lr());
    return rates;
  }

  /// Counted anew when there are more states.
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
    const at::Tensor saved = written_state();
    if (std::exchange(load_is_proven_, true)) return saved;
    // Whether load() takes what save() writes is found out at the first save, and not when it is needed.
    States mine = std::exchange(optimizer_->state(), {});
    try {
      load_rank(saved, nullptr);
    } catch (...) {
      load_is_proven_ = false;
      optimizer_->state() = std::move(mine);
      throw;
    }
    optimizer_->state() = std::move(mine);
    return saved;
  }

  void check_state_of_another_program(const at::Tensor&) const override {
    throw Error("states of another program cannot be given to ", name_,
                ", whose load() reads those of C++ alone; expected load_optimizer_states = false");
  }

  void set_state(const std::vector<at::Tensor>& saved, const zero::NamesInCheckpoint* names) override {
    States mine = std::exchange(optimizer_->state(), {});  // of a parameter that is not saved it stays
    for (const at::Tensor& of_rank : saved) {
      optimizer_->state().clear();
      for (void* parameter : load_rank(of_rank, names)) {
        mine.erase(parameter);
        const auto state = optimizer_->state().find(parameter);
        if (owned_.contains(parameter) && state != optimizer_->state().end())
          mine[parameter] = std::move(state->second);
      }
    }
    optimizer_->state() = std::move(mine);
    measured_states_ = kNotMeasured;
  }

 private:
  using States = std::remove_cvref_t<decltype(std::declval<optim::Optimizer&>().state())>;

  at::Tensor written_state() const {
    StateValuesWriter writer;
    json groups = json::array();
    const std::vector<std::vector<at::Tensor>> owned = owned_parameters();
    for (const std::vector<at::Tensor>& group : owned) {
      json names = json::array();
      for (const at::Tensor& tensor : group) names.push_back(names_.at(tensor.unsafeGetTensorImpl()));
      groups.push_back(names);
    }
    for (const auto& [parameter, state] : optimizer_->state())
      if (!owned_.contains(parameter))
        throw Error(name_,
                    " has a state that is of no parameter in its groups, and cannot be saved; "
                    "expected states of parameters alone");
    json archive = json::object();
    if (!owned_.empty()) {
      OutputArchive written;
      {
        const OtherParameters mine(*optimizer_, owned);
        optimizer_->save(written);
      }
      InputArchive read = read_back(written, at::kCPU);
      archive = to_values(read, "", writer);
      if (archive.empty())
        throw Error(name_,
                    ": save() writes nothing, so what it keeps would be lost; expected it to override "
                    "save() and load(), as the optimizers of torch::optim do");
    }
    return writer.finish(
        {{"torch::optim", archive}, {"groups", groups}, {"num_states", optimizer_->state().size()}});
  }

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

  /// The optimizer's states are then those of one rank of the checkpoint. Returns the parameters that the
  /// rank owned; `names` as in set_state().
  std::set<void*> load_rank(const at::Tensor& data, const zero::NamesInCheckpoint* names) const {
    const std::string what = str("states of ", name_);
    const StateValuesReader reader(data, what);
    const JsonField values = reader.values(), groups = values["groups"], archive = values["torch::optim"];
    std::map<std::string, std::string> taken;  // from the names in the checkpoint
    if (names != nullptr)
      for (const auto& [name, saved] : *names)
        if (const auto [other, is_new] = taken.emplace(saved, name); !is_new)
          throw Error(what, ": those of ", saved, " would be of both ", other->second, " and ", name,
                      ", which were tied; expected one parameter for each, or no optimizer states");
    std::set<void*> owned;
    std::vector<at::Tensor> others;
    std::vector<std::vector<at::Tensor>> parameters;
    groups.for_each([&](const JsonField& group) {
      parameters.emplace_back();
      group.for_each([&](const JsonField& name) {
        if (names != nullptr && !taken.contains(name.text())) {  // load() goes by places
          parameters.back().push_back(others.emplace_back(at::empty({0})));
          return;
        }
        const auto tensor = tensors_.find(names == nullptr ? name.text() : taken.at(name.text()));
        if (tensor == tensors_.end()) name.fail("a parameter of the model");
        parameters.back().push_back(tensor->second);
        owned.insert(tensor->second.unsafeGetTensorImpl());
      });
    });
    if (parameters.size() != optimizer_->param_groups().size())
      groups.fail(str("the optimizer's ", optimizer_->param_groups().size(), " groups"));
    if (owned.empty()) return owned;
    try {
      OutputArchive written;
      to_archive(archive, reader, written);
      InputArchive read = read_back(written, tensors_.begin()->second.device());
      const OtherParameters theirs(*optimizer_, std::move(parameters));
      optimizer_->load(read);
    } catch (const Error&) {
      throw;
    } catch (const c10::Error& error) {
      throw Error(what, ": ", error.what_without_backtrace());
    } catch (const std::exception& error) {  // of std::stoull, in libtorch
      throw Error(what, ": ", error.what(), "; expected what this optimizer has saved");
    }
    const int64_t expected = values["num_states"].integer(0);
    if (static_cast<int64_t>(optimizer_->state().size()) != expected)
      throw Error(what, ": load() has restored ", optimizer_->state().size(), " of ", expected,
                  "; expected it to take what save() writes");
    return owned;
  }

  static constexpr size_t kNotMeasured = static_cast<size_t>(-1);

  std::shared_ptr<optim::Optimizer> optimizer_;
  std::string name_;
  bool on_one_rank_;
  std::vector<int> group_of_;
  std::map<std::string, at::Tensor> tensors_;
  std::map<void*, std::string> names_;
  std::set<void*> owned_;
  mutable bool load_is_proven_ = false;
  mutable size_t measured_states_ = kNotMeasured;
  mutable int64_t measured_bytes_ = 0;
};

}  // namespace

std::shared_ptr<zero::WholeOptimizer> run_as_it_is(std::shared_ptr<optim::Optimizer> optimizer,
                                                   const std::vector<zero::NamedTensor>& parameters,
                                                   bool on_one_rank, std::vector<int> group_of) {
  return std::make_shared<WholeTorchOptimizer>(std::move(optimizer), parameters, on_one_rank,
                                               std::move(group_of));
}

}  // namespace tessera
