#include "zero/model/module_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "zero/deferred/operator_log.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero {

using nlohmann::json;

namespace {

/// libtorch's modules: in C++ a state dict leaves no buffer out, and TorchScript does not keep which it does.
class BuffersOf final : public ModuleState {
 public:
  explicit BuffersOf(std::function<std::vector<NamedBuffer>()> list) : list_(std::move(list)) {}
  std::vector<NamedBuffer> buffers() const override { return list_(); }

 private:
  const std::function<std::vector<NamedBuffer>()> list_;
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
  return std::make_shared<BuffersOf>([&model] {
    std::vector<NamedBuffer> buffers;
    for (const auto& item : model.named_buffers()) buffers.push_back({item.key(), item.value()});
    return buffers;
  });
}

std::shared_ptr<ModuleState> state_of(const torch::jit::Module& model) {
  return std::make_shared<BuffersOf>([model] {  // a handle
    std::vector<NamedBuffer> buffers;
    for (const auto& item : model.named_buffers()) buffers.push_back({item.name, item.value});
    return buffers;
  });
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

namespace {

/// What ranks tell each other of a buffer.
struct BufferRecord {
  std::string name;
  BufferKind kind;
  uint64_t hash = 0;  ///< of the values
  bool operator==(const BufferRecord&) const = default;
};

/// Encodes a record for each buffer. In CBOR, because a name may have any bytes, and JSON's text is UTF-8.
std::string encode_buffers(const std::vector<NamedTensor>& buffers) {
  json records = json::array();
  for (const auto& [name, tensor] : buffers)
    records.push_back({name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec(),
                       deferred::hash_of(bytes_of_elements(tensor).cpu())});
  std::string bytes;
  json::to_cbor(records, bytes);
  return bytes;
}

std::vector<BufferRecord> decode_buffers(const std::string& bytes) {
  std::vector<BufferRecord> buffers;
  for (const json& record : json::from_cbor(bytes))
    buffers.push_back(
        {record[0].get<std::string>(),
         {static_cast<at::ScalarType>(record[1].get<int>()), record[2].get<std::vector<int64_t>>()},
         record[3].get<uint64_t>()});
  return buffers;
}

void check_same_buffers(const std::vector<std::vector<BufferRecord>>& by_rank) {
  const auto names_of = [](const std::vector<BufferRecord>& buffers) {
    std::vector<std::string> names;
    for (const BufferRecord& buffer : buffers) names.push_back(buffer.name);
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
      throw CommError("rank ", with, "'s module has the buffer ",
                      without_control_characters(name, /*one_line=*/true), ", rank ", without,
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

}  // namespace

void broadcast_buffers(const std::vector<NamedTensor>& mine, comm::Communicator& comm, at::Device device) {
  const OurOwnWork scope;
  for (const auto& [name, tensor] : mine)
    if (const std::string why = no_bytes(tensor); !why.empty())
      throw Error("buffer ", name, " ", why,
                  " and cannot be sent to other ranks: register a dense tensor of plain numbers");
  std::vector<std::vector<BufferRecord>> by_rank;
  for (const std::string& bytes : comm.exchange(encode_buffers(mine), "buffers"))
    by_rank.push_back(decode_buffers(bytes));
  check_same_buffers(by_rank);
  for (size_t i = 0; i < mine.size(); ++i) {
    const BufferRecord& first = by_rank[0][i];
    if (std::ranges::all_of(by_rank, [&](const auto& theirs) { return theirs[i] == first; })) continue;
    const BufferKind& kind = first.kind;
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
