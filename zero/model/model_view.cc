#include "zero/model/model_view.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "comm/torch_dtype.h"
#include "core/check.h"
#include "core/error.h"
#include "zero/deferred/deferred_model.h"
#include "zero/memory/unit_memory.h"

namespace tessera::zero {
namespace {

void check_can_be_sharded(const NamedTensor& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  const auto refuse = [&](const std::string& why) {
    throw ConfigError("parameter ", parameter.name, " ", why);
  };
  if (tensor.is_sparse() || !tensor.has_storage()) refuse("is not a dense tensor and cannot be sharded");
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (const UnitHandle* unit = find_unit(storage)) {
    if (unit->residency != nullptr)
      refuse(
          "belongs to an engine: initialize() was called on this model before. Use that engine, or end it "
          "first (in Python by engine.destroy() on all ranks)");
    if (storage._mutable_data_ptr_no_checks().get() == unit->guard->data())
      refuse(
          "has no values any more: they were sharded over the ranks by an engine that is gone. Before an "
          "engine "
          "goes, save the model, or (in Python) call engine.destroy() on all ranks, which leaves whole "
          "parameters");
  }
  const std::optional<DType> dtype = find_dtype(tensor.scalar_type());
  if (tensor.requires_grad() ? !dtype || !is_compute_type(*dtype) : !dtype || !is_kept_frozen(*dtype))
    refuse(str("is ", c10::toString(tensor.scalar_type()),
               tensor.requires_grad() ? "; parameters that are trained must be fp32, bf16 or fp16: call "
                                        "model->to(torch::kFloat32), or freeze it"
                                      : ", whose elements cannot be computed with; register it as a buffer"));
  if (!tensor.is_non_overlapping_and_dense())
    refuse("is an expanded or strided view; register a contiguous tensor (tensor.contiguous())");
}

/// Whether the method, or what it calls but for methods of submodules, has a torch.jit.fork.
bool forks(torch::jit::Function& method) {
  bool found = false;
  std::set<const torch::jit::Function*> visited;
  visit_code(method, visited, [&](torch::jit::Function&, const torch::jit::Node* node) {
    found = found ||
            (node != nullptr && (node->kind() == at::prim::fork || node->kind() == at::prim::forkClosure));
  });
  return found;
}

std::string forking_method(const torch::jit::Module& model) {
  for (const torch::jit::Module& module : model.modules())
    for (const torch::jit::Method& method : module.get_methods())
      if (forks(method.function())) return method.function().qualname().qualifiedName();
  return "";
}

/// Whether two tensors have bytes of memory in common.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage() || memory_of(a) != memory_of(b)) return false;
  const auto extent = [](const at::Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto size = static_cast<int64_t>(tensor.itemsize());
    return Range{tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size};
  };
  return intersect(extent(a), extent(b)).numel() > 0;
}

/// Two different parameters in the same memory: an update of one would change the other in plain libtorch,
/// and not any more once they live in units.
void check_no_overlap(const std::vector<NamedTensor>& parameters) {
  std::unordered_map<const void*, std::vector<const NamedTensor*>> by_storage;
  for (const NamedTensor& parameter : parameters) {
    if (parameter.tensor.numel() == 0) continue;
    const void* memory = memory_of(parameter.tensor);
    for (const NamedTensor* other : by_storage[memory]) {
      if (other->tensor.unsafeGetTensorImpl() == parameter.tensor.unsafeGetTensorImpl()) continue;
      if (overlap(parameter.tensor, other->tensor))
        throw ConfigError(
            "parameters ", other->name, " and ", parameter.name,
            " share memory without being the same tensor; tie them by registering one tensor twice");
    }
    by_storage[memory].push_back(&parameter);
  }
}

void visit_tensors(const c10::IValue& value, const std::string& name,
                   const std::function<void(const std::string& name, const at::Tensor& tensor)>& visit) {
  const auto visit_list = [&](const auto& elements) {
    int64_t index = 0;
    for (const c10::IValue& element : elements) visit_tensors(element, str(name, "[", index++, "]"), visit);
  };
  if (value.isTensor()) return visit(name, value.toTensor());
  if (value.isTuple()) return visit_list(value.toTupleRef().elements());
  if (value.isList()) return visit_list(value.toListRef());
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict())
      visit_tensors(entry.value(), tessera::str(name, "[", entry.key(), "]"), visit);
  } else if (value.isObject()) {
    const auto object = value.toObject();
    for (size_t slot = 0; slot < object->type()->numAttributes(); ++slot)
      visit_tensors(object->getSlot(slot),
                    str(name, name.empty() ? "" : ".", object->type()->getAttributeName(slot)), visit);
  }
}

/// Attributes of all modules, and what they hold.
std::vector<NamedTensor> members_of(const torch::jit::Module& model) {
  std::vector<NamedTensor> members;
  visit_tensors(model._ivalue(), "", [&](const std::string& name, const at::Tensor& tensor) {
    members.push_back({"attribute " + name, tensor});
  });
  return members;
}

/// Gives access to a module's own list: all that libtorch offers to others copies it, with names.
struct ParametersOf : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& list(const torch::nn::Module& module) {
    return module.*(&ParametersOf::parameters_);
  }
};

/// Compares tensors one by one with those of a list.
class Comparison {
 public:
  explicit Comparison(const std::vector<NamedTensor>& list) : list_(list) {}
  void next(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    same_ = same_ && next_ < list_.size() && list_[next_].tensor.is_same(tensor);
    ++next_;
  }
  bool same() const { return same_ && next_ == list_.size(); }

 private:
  const std::vector<NamedTensor>& list_;
  size_t next_ = 0;
  bool same_ = true;
};

}  // namespace

bool holds(const torch::nn::Module& model, const std::vector<NamedTensor>& parameters) {
  Comparison comparison(parameters);
  model.apply([&](const torch::nn::Module& module) {
    for (const auto& item : ParametersOf::list(module)) comparison.next(item.value());
  });
  return comparison.same();
}

bool holds(const torch::jit::Module& model, const std::vector<NamedTensor>& parameters) {
  Comparison comparison(parameters);
  for (const at::Tensor& tensor : model.parameters()) comparison.next(tensor);
  return comparison.same();
}

std::vector<NamedTensor> parameters_of(const torch::nn::Module& model) {
  std::vector<NamedTensor> parameters;
  for (const auto& item : model.named_parameters())
    if (item.value().defined()) parameters.push_back({item.key(), item.value()});
  return parameters;
}

std::vector<NamedTensor> parameters_of(const torch::jit::Module& model) {
  std::vector<NamedTensor> parameters;
  for (const auto& item : model.named_parameters()) parameters.push_back({item.name, item.value});
  return parameters;
}

ModelView view_of(const torch::nn::Module& model, DeferredModel* deferred) {
  ModelView view;
  view.deferred = deferred;
  view.parameters = parameters_of(model);
  view.state = state_of(model);
  view.program = [&model] { return program_of(model); };
  return view;
}

ModelView view_of(const torch::jit::Module& model, DeferredModel* deferred) {
  ModelView view;
  view.deferred = deferred;
  view.scripted = true;
  view.forks_in = forking_method(model);
  view.parameters = parameters_of(model);
  view.state = state_of(model);
  refuse_views(view.parameters, members_of(model));
  view.members_searched = true;
  view.program = [model] { return program_of(model); };  // a handle
  return view;
}

void refuse_views(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& held) {
  std::unordered_map<const void*, std::vector<const NamedTensor*>> by_memory;
  for (const NamedTensor& parameter : parameters)
    if (parameter.tensor.has_storage()) by_memory[memory_of(parameter.tensor)].push_back(&parameter);
  for (const auto& [holder, tensor] : held) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) continue;
    const auto found = by_memory.find(memory_of(tensor));
    if (found == by_memory.end()) continue;
    const auto is_it = [&, &view = tensor](const NamedTensor* one) { return one->tensor.is_same(view); };
    if (std::any_of(found->second.begin(), found->second.end(), is_it)) continue;
    for (const NamedTensor* parameter : found->second)
      if (overlap(parameter->tensor, tensor))
        throw ConfigError(
            holder, " lies in the memory of parameter ", parameter->name,
            " and would keep its first values, as the parameter moves into the engine's memory: "
            "compute the view in forward(), tie modules by registering one parameter twice, or "
            "clone() what is to keep these values");
  }
}

void refuse_other_holders(const ModelView& model, const std::function<void(const std::string&)>& warn) {
  std::vector<NamedTensor> buffers;
  if (model.state != nullptr)
    for (const NamedBuffer& buffer : model.state->buffers())
      buffers.push_back({"buffer " + buffer.name, buffer.tensor});
  refuse_views(model.parameters, buffers);
  // Memory that is not there yet is counted by nobody, and in Python objects that stand for a storage count,
  // too: tessera.module_members looks there.
  if (model.deferred != nullptr || (model.members_searched && !model.scripted)) return;
  std::unordered_map<const c10::StorageImpl*, std::unordered_set<const at::TensorImpl*>> own;
  for (const NamedTensor& parameter : model.parameters)
    own[parameter.tensor.storage().unsafeGetStorageImpl()].insert(parameter.tensor.unsafeGetTensorImpl());
  for (const auto& [name, buffer] : buffers)
    if (buffer.defined() && buffer.has_storage())
      if (const auto shared = own.find(buffer.storage().unsafeGetStorageImpl()); shared != own.end())
        shared->second.insert(buffer.unsafeGetTensorImpl());
  for (const NamedTensor& parameter : model.parameters) {
    const auto holders = own.at(parameter.tensor.storage().unsafeGetStorageImpl()).size();
    if (parameter.tensor.numel() == 0 || parameter.tensor.storage().use_count() <= holders) continue;
    const std::string what =
        str("the memory of parameter ", parameter.name,
            " is also held by another tensor, which keeps the values of before initialize()");
    if (model.members_searched)
      return warn(str(what,
                      ": it is outside of the model (a state dict, a view, an array, or the graph of an "
                      "earlier forward) and does not follow the training"));
    throw ConfigError(
        what,
        ": a member of the module that is a view of it, a tensor kept elsewhere, or the graph of "
        "an earlier forward. Compute views in forward(), clone() what is to keep these values, "
        "and let the rest go before initialize()");
  }
}

void refuse_forks(const ModelView& model, const Sharding& sharding) {
  if (sharding.parameters && !model.forks_in.empty())
    throw ConfigError("the model's ", model.forks_in,
                      " uses torch.jit.fork: at stage 3 one thread at a time may run the model. Export "
                      "it without fork, or use stage 2");
}

ParameterList list_parameters(const ModelView& model, DType compute_dtype) {
  ParameterList list;
  std::unordered_map<const at::TensorImpl*, size_t> known;
  for (const NamedTensor& parameter : model.parameters) check_can_be_sharded(parameter);
  check_no_overlap(model.parameters);
  for (const NamedTensor& parameter : model.parameters) {
    const auto [entry, is_new] = known.emplace(parameter.tensor.unsafeGetTensorImpl(), list.specs.size());
    if (!is_new) {
      list.specs[entry->second].aliases.push_back(parameter.name);
      continue;
    }
    list.specs.push_back({.name = parameter.name,
                          .shape = parameter.tensor.sizes().vec(),
                          .dtype = dtype_in_unit(from_torch(parameter.tensor.scalar_type()), compute_dtype),
                          .trainable = parameter.tensor.requires_grad(),
                          .group = 0,
                          .aliases = {}});
    list.tensors.push_back(parameter.tensor);
  }
  return list;
}

}  // namespace tessera::zero
