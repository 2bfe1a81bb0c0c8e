#include "zero/model/module_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <sstream>

#include "core/error.h"
#include "core/str.h"
#include "zero/deferred/operator_log.h"
#include "zero/memory/pause_listening.h"

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

/// A line a buffer: name, dtype, sizes, and a hash of the values.
static std::string describe(const std::vector<NamedTensor>& buffers) {
  std::string text;
  for (const auto& [name, tensor] : buffers)
    text += str(name, '\t', static_cast<int>(tensor.scalar_type()), '\t', join(tensor.sizes().vec(), ","),
                '\t', deferred::hash_of(bytes_of_elements(tensor).cpu()), '\n');
  return text;
}

static std::vector<std::pair<std::string, BufferKind>> parse_buffers(const std::string& text) {
  std::vector<std::pair<std::string, BufferKind>> buffers;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t hash = line.rfind('\t'), sizes = line.rfind('\t', hash - 1),
                 dtype = line.rfind('\t', sizes - 1);
    BufferKind kind;
    kind.dtype = static_cast<at::ScalarType>(std::stoi(line.substr(dtype + 1)));
    std::istringstream list(line.substr(sizes + 1, hash - sizes - 1));
    for (std::string size; std::getline(list, size, ',');) kind.shape.push_back(std::stoll(size));
    buffers.emplace_back(line.substr(0, dtype), std::move(kind));
  }
  return buffers;
}

static void check_same_buffers(const std::vector<std::string>& by_rank) {
  const auto names_of = [](const std::string& text) {
    std::vector<std::string> names;
    for (const auto& [name, kind] : parse_buffers(text)) names.push_back(name);
    return names;
  };
  const auto lacks = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) == names.end();
  };
  const std::vector<std::string> first = names_of(by_rank[0]);
  for (int rank = 1; rank < static_cast<int>(by_rank.size()); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    const std::vector<std::string> theirs = names_of(by_rank[rank]);
    const auto refuse = [&](const std::string& name, int with, int without) {
      throw CommError("rank ", with, "'s module has the buffer ", name, ", rank ", without,
                      "'s has none of that name: all ranks must register the same buffers");
    };
    for (const std::string& name : first)
      if (lacks(theirs, name)) refuse(name, 0, rank);
    for (const std::string& name : theirs)
      if (lacks(first, name)) refuse(name, rank, 0);
    if (theirs != first)
      throw CommError("rank ", rank,
                      "'s module has its buffers in another order than rank 0's: all ranks "
                      "must register the same buffers");
  }
}

/// By line of rank 0's text, whether a rank has another one there. All have as many lines.
static std::vector<bool> differing_lines(const std::vector<std::string>& by_rank) {
  std::vector<bool> differs;
  std::vector<std::istringstream> texts;
  for (const std::string& text : by_rank) texts.emplace_back(text);
  for (std::string first; std::getline(texts[0], first);) {
    differs.push_back(false);
    for (size_t rank = 1; rank < texts.size(); ++rank) {
      std::string line;
      std::getline(texts[rank], line);
      if (line != first) differs.back() = true;
    }
  }
  return differs;
}

void broadcast_buffers(const std::vector<NamedTensor>& mine, comm::Communicator& comm, at::Device device) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : mine)
    if (const std::string why = no_bytes(tensor); !why.empty())
      throw Error("buffer ", name, " ", why,
                  " and cannot be sent to other ranks: register a dense tensor of plain numbers");
  const std::vector<std::string> by_rank = comm.exchange(describe(mine), "buffers");
  check_same_buffers(by_rank);
  const std::vector<std::pair<std::string, BufferKind>> first = parse_buffers(by_rank[0]);
  const std::vector<bool> differs = differing_lines(by_rank);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (!differs[i]) continue;
    const BufferKind& kind = first[i].second;
    const at::Tensor& buffer = mine[i].tensor;
    // A collective needs memory of its own: another buffer may share this one's.
    at::Tensor bytes = comm.rank() == 0 ? bytes_of_elements(buffer.to(device)).clone()
                                        : at::empty({c10::multiply_integers(kind.shape) *
                                                     static_cast<int64_t>(c10::elementSize(kind.dtype))},
                                                    at::TensorOptions(at::kByte).device(device));
    if (bytes.numel() > 0) comm.broadcast(bytes, 0, "buffers")->wait();
    if (comm.rank() != 0)
      write_buffer(buffer, from_bytes(bytes, kind), /*keep_dtype=*/false);
    else if (!buffer.is_inference())
      torch::autograd::impl::bump_version(
          buffer);  // a graph that has saved it is stale on all ranks or on none
  }
}

}  // namespace tessera::zero
