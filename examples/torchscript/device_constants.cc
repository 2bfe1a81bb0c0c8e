#include "examples/torchscript/device_constants.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace tessera::examples {
namespace {

using c10::IValue;
using torch::jit::Graph;
using torch::jit::Node;

class DeviceSetter {
 public:
  explicit DeviceSetter(c10::Device device) : device_(device) {}

  void set_in(Graph& graph) { set_in(graph, *graph.block()); }

  void set_in(torch::jit::Function& function) {
    auto* const with_graph = torch::jit::tryToGraphFunction(function);
    if (with_graph == nullptr) return;
    function.ensure_defined();
    set_in(*with_graph->graph());
    with_graph->clear_optimized_graphs();
    const c10::FunctionSchema& schema = function.getSchema();
    std::vector<c10::Argument> arguments;
    bool changed = false;
    for (const c10::Argument& argument : schema.arguments()) {
      const auto value = argument.default_value() ? on_device(*argument.default_value()) : std::nullopt;
      changed = changed || value;
      arguments.push_back(!value ? argument
                                 : c10::Argument(argument.name(), argument.type(), argument.N(), value,
                                                 argument.kwarg_only()));
    }
    if (changed) function.setSchema(schema.cloneWithArguments(std::move(arguments)));
  }

  /// Parameters and buffers are the engine's.
  void set_in(c10::ivalue::Object& object) {
    if (!seen_.insert(&object).second) return;
    for (size_t slot = 0; slot < object.slots().size(); ++slot) {
      if (object.type()->is_parameter(slot) || object.type()->is_buffer(slot)) continue;
      if (auto value = on_device(object.getSlot(slot))) object.setSlot(slot, std::move(*value));
    }
  }

 private:
  void set_in(Graph& graph, torch::jit::Block& block) {
    const std::vector<Node*> nodes(block.nodes().begin(), block.nodes().end());
    for (Node* const node : nodes) {
      for (torch::jit::Block* const inner : node->blocks()) set_in(graph, *inner);
      for (const c10::Symbol name : node->attributeNames()) {
        if (node->kindOf(name) == torch::jit::AttributeKind::g) set_in(*node->g(name));
        if (node->kindOf(name) != torch::jit::AttributeKind::gs) continue;
        for (const auto& inner : node->gs(name)) set_in(*inner);
      }
      if (node->kind() == c10::aten::_pack_padded_sequence) keep_on_cpu(graph, *node, 1);
      if (auto value = constant_on_device(*node)) replace(graph, *node, *value);
    }
  }

  std::optional<IValue> constant_on_device(Node& node) {
    if (node.kind() == c10::prim::Constant) {
      const std::optional<IValue> value = torch::jit::toIValue(node.output());
      return value ? on_device(*value) : std::nullopt;
    }
    // torch.device("cpu"), torch.device("cuda", 0) in a script.
    if (node.kind() != c10::aten::device) return std::nullopt;
    const std::optional<IValue> name = torch::jit::toIValue(node.input(0));
    if (!name || !name->isString()) return std::nullopt;
    return on_device(IValue(c10::Device(name->toStringRef())));
  }

  void replace(Graph& graph, Node& node, const IValue& value) {
    const torch::jit::WithInsertPoint here(&node);
    node.output()->replaceAllUsesWith(graph.insertConstant(value, node.sourceRange(), node.scope()));
    node.destroy();
  }

  void keep_on_cpu(Graph& graph, Node& node, size_t argument) {
    if (device_.is_cpu()) return;
    const torch::jit::WithInsertPoint here(&node);
    node.replaceInput(argument, graph.insert(c10::Symbol::aten("cpu"), {node.input(argument)}));
  }

  /// Nothing where the value is right as it is.
  std::optional<IValue> on_device(const IValue& value) {
    if (value.isDevice()) {
      const c10::Device device = value.toDevice();
      return device == device_ || device.is_meta() ? std::nullopt : std::optional<IValue>(device_);
    }
    if (value.isTensor()) return moved(value.toTensor());
    if (value.isObject()) set_in(value.toObjectRef());
    if (value.isTuple()) {
      std::vector<IValue> elements = value.toTupleRef().elements().vec();
      if (!set_each(elements)) return std::nullopt;
      return c10::ivalue::Tuple::create(std::move(elements));
    }
    if (value.isList()) {  // in place: others may hold it
      c10::List<IValue> list = value.toList();
      for (size_t i = 0; i < list.size(); ++i)
        if (const auto element = on_device(list.get(i))) list.set(i, *element);
    }
    if (value.isGenericDict()) {
      const c10::Dict<IValue, IValue> dictionary = value.toGenericDict();
      for (const auto& entry : dictionary)
        if (const auto element = on_device(entry.value())) entry.setValue(*element);
    }
    return std::nullopt;
  }

  bool set_each(std::vector<IValue>& elements) {
    bool changed = false;
    for (IValue& element : elements) {
      auto value = on_device(element);
      changed = changed || value;
      if (value) element = std::move(*value);
    }
    return changed;
  }

  std::optional<IValue> moved(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.dim() == 0 || tensor.is_meta() || tensor.device() == device_)
      return std::nullopt;
    at::Tensor& copy = copies_[tensor.unsafeGetTensorImpl()];
    if (!copy.defined()) {
      originals_.push_back(tensor);  // keeps its address from being used again
      copy = tensor.to(device_);
    }
    return copy;
  }

  const c10::Device device_;
  std::map<const c10::TensorImpl*, at::Tensor> copies_;  // one of each, as there was
  std::vector<at::Tensor> originals_;
  std::set<const c10::ivalue::Object*> seen_;
};

}  // namespace

void set_device_constants(torch::jit::Module& module, c10::Device device) {
  const at::NoGradGuard no_grad;
  DeviceSetter setter(device);
  for (torch::jit::Function* const function : module._ivalue()->compilation_unit()->get_functions())
    setter.set_in(*function);
  setter.set_in(*module._ivalue());
}

}  // namespace tessera::examples
