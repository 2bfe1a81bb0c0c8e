#include "zero/model/module_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include "core/str.h"

namespace tessera::zero {
namespace {

/// A C++ module: libtorch's have no buffers that a state dict leaves out.
class CppModuleState final : public ModuleState {
 public:
  explicit CppModuleState(const torch::nn::Module& model) : model_(model) {}
  std::vector<NamedBuffer> buffers() const override {
    std::vector<NamedBuffer> buffers;
    for (const auto& item : model_.named_buffers()) buffers.push_back({item.key(), item.value()});
    return buffers;
  }

 private:
  const torch::nn::Module& model_;
};

/// TorchScript does not keep which buffers a state dict leaves out.
class ScriptModuleState final : public ModuleState {
 public:
  explicit ScriptModuleState(torch::jit::Module model) : model_(std::move(model)) {}
  std::vector<NamedBuffer> buffers() const override {
    std::vector<NamedBuffer> buffers;
    for (const auto& item : model_.named_buffers()) buffers.push_back({item.name, item.value});
    return buffers;
  }

 private:
  torch::jit::Module model_;  // a handle
};

/// libtorch copies no elements of the types that are bits only; integers of their size it does.
at::Tensor with_kernels(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::ScalarType::Bits16) return tensor.view(at::kShort);
  const bool bits_only = at::isBitsType(dtype) || dtype >= at::ScalarType::UInt1;
  return bits_only && tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor;
}

}  // namespace

std::shared_ptr<ModuleState> state_of(const torch::nn::Module& model) {
  return std::make_shared<CppModuleState>(model);
}

std::shared_ptr<ModuleState> state_of(const torch::jit::Module& model) {
  return std::make_shared<ScriptModuleState>(model);
}

std::string no_bytes(const at::Tensor& tensor) {
  if (tensor.is_quantized()) return str("is quantized (", c10::toString(tensor.scalar_type()), ")");
  if (tensor.layout() != at::kStrided) return tessera::str("is not dense (", tensor.layout(), ")");
  if (tensor.is_meta()) return "has no values (it is on the meta device)";
  return "";
}

at::Tensor bytes_of_elements(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return with_kernels(tensor.detach().resolve_conj().resolve_neg()).contiguous().reshape(-1).view(at::kByte);
}

at::Tensor from_bytes(const at::Tensor& bytes, const BufferKind& kind) {
  return bytes.view(kind.dtype).view(kind.shape);
}

bool converts(at::ScalarType from, at::ScalarType to) {
  if (from == to) return true;
  const auto is_number = [](at::ScalarType type) {
    return type <= at::kComplexDouble || type == at::kBool || type == at::kBFloat16 ||
           at::isFloat8Type(type) || at::isBarebonesUnsignedType(type);
  };
  return is_number(from) && is_number(to) && (at::isComplexType(to) || !at::isComplexType(from)) &&
         !(at::isFloatingType(from) && at::isIntegralType(to, /*includeBool=*/false));
}

void write_buffer(at::Tensor tensor, const at::Tensor& value, bool keep_dtype) {
  const c10::InferenceMode as_made(tensor.is_inference());  // without it, it enables gradients
  const at::NoGradGuard no_grad;
  const bool same_dtype = tensor.scalar_type() == value.scalar_type();
  if (tensor.sizes() == value.sizes() && (same_dtype || keep_dtype) &&
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes) {
    same_dtype ? with_kernels(tensor).copy_(with_kernels(value)) : tensor.copy_(value);
    return;
  }
  const at::Tensor moved = value.to(tensor.device());
  const at::Tensor own = keep_dtype ? moved.to(tensor.scalar_type()) : moved;
  tensor.set_data(own.is_same(value) ? from_bytes(bytes_of_elements(own).clone(), kind_of(own)) : own);
}

}  // namespace tessera::zero
