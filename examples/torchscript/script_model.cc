#include "examples/torchscript/script_model.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>

#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "comm/control/error_message.h"
#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "train/memory/out_of_memory.h"

namespace tessera::examples {
namespace {

void check_trainable(const torch::jit::Module& model, const std::string& path) {
  int64_t num_parameters = 0, num_trainable = 0;
  for (const at::Tensor& parameter : model.parameters()) {
    ++num_parameters;
    num_trainable += parameter.requires_grad() ? 1 : 0;
  }
  if (num_parameters == 0)
    throw DataError(
        path,
        ": the module has no parameters; expected one that torch.jit.freeze has not turned into constants");
  if (num_trainable == 0)
    throw DataError(path, ": none of the module's ", num_parameters,
                    " parameters requires a gradient; nothing could be trained");
}

}  // namespace

ScriptModel load_script_model(const std::string& path) {
  const std::string expected = "; expected a file that torch.jit.save wrote";
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw DataError(path, ": is a folder", expected);
  ScriptModel model;
  try {
    model.file = std::make_unique<ScriptFile>(path);
  } catch (const DiskError& error) {
    throw DataError(path, ": cannot be opened: ", error.reason(), expected);
  }
  try {
    model.module = model.file->load();
  } catch (const DataError&) {
    throw;
  } catch (const std::exception& caught) {
    throw DataError(path, ": no TorchScript module: ", comm::error_message(caught), expected);
  }
  check_trainable(*model.module, path);
  return model;
}

void check_arguments(const torch::jit::Module& model, const std::string& path, const CallOfForward& call) {
  const auto forward = model.find_method("forward");
  if (!forward) throw DataError(path, ": the module has no forward; expected one");
  const std::vector<c10::Argument>& arguments = forward->function().getSchema().arguments();
  std::vector<std::string> names;
  size_t num_required = 0;
  for (size_t i = 1; i < arguments.size(); ++i) {  // argument 0 is self
    names.push_back(arguments[i].name());
    if (!arguments[i].default_value()) num_required = i;
  }
  const bool with_target = !call.target.empty();
  const size_t num_given = call.inputs.size() + (with_target ? 1 : 0);
  if (num_given >= num_required && num_given <= names.size()) return;
  const std::string takes = str(
      path, ": forward takes ", num_required < names.size() ? str(num_required, " to ") : "", names.size(),
      names.size() == 1 ? " argument" : " arguments", names.empty() ? "" : str(" (", join(names, ", "), ")"));
  if (with_target && call.inputs.size() >= num_required && call.inputs.size() <= names.size())
    throw DataError(takes,
                    ", the inputs alone, and so gives scores and no loss; expected model.loss, such as "
                    "\"cross_entropy\", to be computed of them and ",
                    quoted_name(call.target),
                    " (\"model\", the default, calls forward with the inputs and then the target)");
  throw DataError(
      takes, ", and is given ", num_given, ": ", join(call.inputs, ", "),
      with_target ? str(" of data.inputs, then ", call.target, " of data.target") : " of data.inputs",
      "; expected ", num_required == names.size() ? "as many" : "so many", " names there",
      !with_target && call.inputs.size() < num_required
          ? ", or model.loss \"model\" where forward takes the target last and gives the loss"
          : "");
}

std::vector<at::Tensor> share_parameters(torch::jit::Module& evaluation, const std::string& path,
                                         const torch::jit::Module& training,
                                         const std::string& training_path) {
  std::map<std::string, at::Tensor> parameters, buffers;
  for (const auto& item : training.named_parameters()) parameters.emplace(item.name, item.value);
  for (const auto& item : training.named_buffers()) buffers.emplace(item.name, item.value);
  const std::string expected = "; expected another trace of the same model";
  const auto check_shape = [&](const std::string& name, const at::Tensor& mine, const at::Tensor& theirs) {
    if (mine.sizes() != theirs.sizes())
      throw DataError(path, ": ", quoted_name(name), " has the shape ", describe_shape(mine.sizes()),
                      ", but ", describe_shape(theirs.sizes()), " in ", training_path, expected);
  };
  std::set<std::string> shared;
  std::vector<at::Tensor> own_buffers;
  for (const auto& item : evaluation.named_modules()) {
    torch::jit::Module part = item.value;
    const std::string prefix = item.name.empty() ? "" : item.name + ".";
    for (const auto& parameter : part.named_parameters(/*recurse=*/false)) {
      const std::string name = prefix + parameter.name;
      const auto found = parameters.find(name);
      if (found == parameters.end())
        throw DataError(path, ": has a parameter ", quoted_name(name), ", which ", training_path, " lacks",
                        expected);
      check_shape(name, parameter.value, found->second);
      part.setattr(parameter.name, found->second);
      shared.insert(name);
    }
    for (const auto& buffer : part.named_buffers(/*recurse=*/false)) {
      const std::string name = prefix + buffer.name;
      const auto found = buffers.find(name);
      if (found == buffers.end()) {
        own_buffers.push_back(buffer.value);
        continue;
      }
      check_shape(name, buffer.value, found->second);
      part.setattr(buffer.name, found->second);
    }
  }
  for (const auto& [name, tensor] : parameters)
    if (!shared.contains(name))
      throw DataError(path, ": lacks the parameter ", quoted_name(name), ", which ", training_path, " has",
                      expected,
                      shared.empty() ? ", which torch.jit.freeze has not turned into constants" : "");
  return own_buffers;
}

void share_buffers(torch::jit::Module& evaluation, const torch::jit::Module& training) {
  std::map<std::string, at::Tensor> buffers;
  for (const auto& item : training.named_buffers()) buffers.emplace(item.name, item.value);
  for (const auto& item : evaluation.named_modules()) {
    torch::jit::Module part = item.value;
    for (const auto& buffer : part.named_buffers(/*recurse=*/false)) {
      const auto found = buffers.find(item.name.empty() ? buffer.name : item.name + "." + buffer.name);
      if (found != buffers.end() && !found->second.is_same(buffer.value))
        part.setattr(buffer.name, found->second);
    }
  }
}

namespace {

void add_tensors(const c10::IValue& value, const std::string& name,
                 std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const auto below = [&](const std::string& key) { return name.empty() ? key : name + "." + key; };
  const auto add_list = [&](const auto& elements) {
    int64_t number = 0;
    for (const c10::IValue& element : elements) {
      add_tensors(element, name.empty() ? str("output_", number) : below(std::to_string(number)), tensors);
      ++number;
    }
  };
  if (value.isTensor() && value.toTensor().defined())
    tensors.emplace_back(name.empty() ? "output" : name, value.toTensor());
  if (value.isTuple()) add_list(value.toTupleRef().elements());
  if (value.isList()) add_list(value.toListRef());
  if (!value.isGenericDict()) return;
  for (const auto& entry : value.toGenericDict())
    add_tensors(entry.value(),
                below(entry.key().isString() ? entry.key().toStringRef() : tessera::str(entry.key())),
                tensors);
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> tensors_of(const c10::IValue& value) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  add_tensors(value, "", tensors);
  return tensors;
}

at::Tensor tensor_of(const c10::IValue& value, const std::string& key, const std::string& path) {
  if (value.isTensor()) return value.toTensor();
  if (value.isTuple() && !value.toTupleRef().elements().empty())
    return tensor_of(value.toTupleRef().elements()[0], key, path);
  if (value.isList() && !value.toListRef().empty()) return tensor_of(value.toListRef()[0], key, path);
  if (value.isGenericDict()) {
    const auto entries = value.toGenericDict();
    std::vector<std::string> names;
    for (const auto& entry : entries) {
      names.push_back(entry.key().isString() ? quoted_name(entry.key().toStringRef()) : "?");
      if (entries.size() == 1 || (entry.key().isString() && entry.key().toStringRef() == key))
        return tensor_of(entry.value(), key, path);
    }
    throw DataError(path, ": forward gives a dictionary of ", join(names, ", "), "; expected an entry ",
                    quoted_name(key));
  }
  throw DataError(path, ": forward gives a ", value.tagKind(),
                  "; expected a tensor, or a tuple or dictionary of them");
}

void rethrow_of_model(const std::string& path, const std::function<std::string()>& origin) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::logic_error&) {
    throw;
  } catch (const std::exception& error) {
    if (train::is_out_of_memory(error))
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, comm::error_message(error));
    throw DataError(origin(), ": ", path, ": forward failed: ", comm::error_message(error));
  }
}

}  // namespace tessera::examples
