#include "zero/model_view.h"

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/nn/module.h>

#include <unordered_map>

#include "comm/torch_dtype.h"
#include "core/check.h"
#include "core/error.h"
#include "zero/deferred_model.h"

namespace tessera::zero {
namespace {

void check_can_be_sharded(const NamedTensor& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(str("parameter ", parameter.name, " ", why));
  };
  if (tensor.is_sparse() || !tensor.has_storage()) refuse("is not a dense tensor and cannot be sharded");
  if (!tensor.is_floating_point() || tensor.scalar_type() == at::kDouble ||
      at::isFloat8Type(tensor.scalar_type()))
    refuse(str("is ", c10::toString(tensor.scalar_type()),
               "; parameters must be fp32, bf16 or fp16: call model->to(torch::kFloat32)"));
  if (!tensor.is_non_overlapping_and_dense())
    refuse("is an expanded or strided view; register a contiguous tensor (tensor.contiguous())");
}

/// Two different parameters in the same memory: an update of one would change the other in plain libtorch,
/// and not any more once they live in units.
void check_no_overlap(const std::vector<NamedTensor>& parameters) {
  std::unordered_map<const void*, std::vector<const NamedTensor*>> by_storage;
  const auto bytes_of = [](const at::Tensor& tensor) {  // dense: see check_can_be_sharded()
    const auto size = static_cast<int64_t>(tensor.itemsize());
    return Range{tensor.storage_offset() * size, (tensor.storage_offset() + tensor.numel()) * size};
  };
  for (const NamedTensor& parameter : parameters) {
    const void* memory = memory_of(parameter.tensor);
    for (const NamedTensor* other : by_storage[memory]) {
      if (other->tensor.unsafeGetTensorImpl() == parameter.tensor.unsafeGetTensorImpl()) continue;
      if (intersect(bytes_of(parameter.tensor), bytes_of(other->tensor)).numel() > 0)
        throw ConfigError(
            str("parameters ", other->name, " and ", parameter.name,
                " share memory without being the same tensor; tie them by registering one tensor twice"));
    }
    if (parameter.tensor.numel() > 0) by_storage[memory].push_back(&parameter);
  }
}

bool forks(const torch::jit::Block& block);

bool forks(torch::jit::Function& function) {
  const auto* graph_function = torch::jit::tryToGraphFunction(function);
  return graph_function != nullptr && forks(*graph_function->graph()->block());
}

/// Whether the code, or free functions and methods of script classes that it calls, has a torch.jit.fork.
/// (Methods of submodules are not looked at here: forking_method() visits every module.)
bool forks(const torch::jit::Block& block) {
  namespace prim = at::prim;
  for (const torch::jit::Node* node : block.nodes()) {
    if (node->kind() == prim::fork || node->kind() == prim::forkClosure) return true;
    if (node->hasAttribute(at::attr::Subgraph) && forks(*node->g(at::attr::Subgraph)->block())) return true;
    for (const torch::jit::Block* inner : node->blocks())
      if (forks(*inner)) return true;
    if (node->kind() == prim::CallFunction) {
      if (forks(*node->input(0)->type()->expectRef<at::FunctionType>().function())) return true;
    } else if (node->kind() == prim::CallMethod) {
      const auto type = node->input(0)->type()->cast<at::ClassType>();
      if (!type || type->is_module()) continue;
      if (auto* method = type->findMethod(node->s(at::attr::name)); method != nullptr && forks(*method))
        return true;
    }
  }
  return false;
}

std::string forking_method(const torch::jit::Module& model) {
  for (const torch::jit::Module& module : model.modules())
    for (const torch::jit::Method& method : module.get_methods())
      if (forks(method.function())) return method.function().qualname().qualifiedName();
  return "";
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
  for (const auto& item : model.named_buffers())
    if (item.value().defined()) view.buffers.push_back({item.key(), item.value()});
  return view;
}

ModelView view_of(const torch::jit::Module& model, DeferredModel* deferred) {
  ModelView view;
  view.deferred = deferred;
  view.scripted = true;
  view.forks_in = forking_method(model);
  view.parameters = parameters_of(model);
  for (const auto& item : model.named_buffers()) view.buffers.push_back({item.name, item.value});
  return view;
}

void refuse_forks(const ModelView& model, const Sharding& sharding) {
  if (sharding.parameters && !model.forks_in.empty())
    throw ConfigError(str("the model's ", model.forks_in,
                          " uses torch.jit.fork: at stage 3 one thread at a time may run the model. Export "
                          "it without fork, or use stage 2"));
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
                          .dtype = compute_dtype == DType::kFloat32
                                       ? from_torch(parameter.tensor.scalar_type())
                                       : compute_dtype,
                          .trainable = parameter.tensor.requires_grad(),
                          .group = 0,
                          .aliases = {}});
    list.tensors.push_back(parameter.tensor);
  }
  return list;
}

}  // namespace tessera::zero
