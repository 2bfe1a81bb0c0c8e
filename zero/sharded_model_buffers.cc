// ShardedModel: the module's buffers, which are rank 0's on all ranks when they are asked for. See [Note: a
// module's state is read when it is used] in module_state.h.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <sstream>

#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/str.h"
#include "zero/sharded_model.h"

namespace tessera::zero {

std::vector<NamedTensor> ShardedModel::buffers() const {
  std::vector<NamedTensor> buffers;
  if (state_ != nullptr)
    for (NamedBuffer& buffer : state_->buffers())
      if (buffer.tensor.defined()) buffers.push_back({std::move(buffer.name), std::move(buffer.tensor)});
  return buffers;
}

std::vector<NamedBuffer> ShardedModel::persistent_buffers() const {
  std::vector<NamedBuffer> buffers;
  if (state_ != nullptr) buffers = state_->buffers();
  std::erase_if(buffers, [](const NamedBuffer& buffer) { return !buffer.persistent; });
  return buffers;
}

std::optional<BufferKind> ShardedModel::first_kind(const std::string& buffer) const {
  const auto found = first_kinds_.find(buffer);
  return found == first_kinds_.end() ? std::nullopt : std::optional(found->second);
}

void ShardedModel::adopt_buffers() {
  for (const auto& [name, buffer] : buffers()) {
    at::Tensor tensor = buffer;
    const bool cast = tensor.is_floating_point() && options_.buffer_dtype.has_value();
    const at::ScalarType dtype = cast ? to_torch(*options_.buffer_dtype) : tensor.scalar_type();
    if (dtype != tensor.scalar_type() || options_.device != tensor.device())
      tensor.set_data(tensor.to(options_.device, dtype));
  }
  broadcast_buffers();
  for (const auto& [name, tensor] : buffers()) first_kinds_[name] = kind_of(tensor);
}

/// A line a buffer: name, dtype and sizes.
static std::string describe(const std::vector<NamedTensor>& buffers) {
  std::string text;
  for (const auto& [name, tensor] : buffers)
    text +=
        str(name, '\t', static_cast<int>(tensor.scalar_type()), '\t', join(tensor.sizes().vec(), ","), '\n');
  return text;
}

static std::vector<std::pair<std::string, BufferKind>> parse_buffers(const std::string& text) {
  std::vector<std::pair<std::string, BufferKind>> buffers;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t sizes = line.rfind('\t'), dtype = line.rfind('\t', sizes - 1);
    BufferKind kind;
    kind.dtype = static_cast<at::ScalarType>(std::stoi(line.substr(dtype + 1)));
    std::istringstream list(line.substr(sizes + 1));
    for (std::string size; std::getline(list, size, ',');) kind.shape.push_back(std::stoll(size));
    buffers.emplace_back(line.substr(0, dtype), std::move(kind));
  }
  return buffers;
}

void ShardedModel::check_same_buffers(const std::vector<std::string>& by_rank) const {
  const auto names_of = [](const std::string& text) {
    std::vector<std::string> names;
    for (const auto& [name, kind] : parse_buffers(text)) names.push_back(name);
    return names;
  };
  const auto lacks = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) == names.end();
  };
  const std::vector<std::string> first = names_of(by_rank[0]);
  for (int rank = 1; rank < comm_->size(); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    const std::vector<std::string> theirs = names_of(by_rank[rank]);
    const auto refuse = [&](const std::string& name, int with, int without) {
      throw CommError(str("rank ", with, "'s module has the buffer ", name, ", rank ", without,
                          "'s has none of that name: all ranks must register the same buffers"));
    };
    for (const std::string& name : first)
      if (lacks(theirs, name)) refuse(name, 0, rank);
    for (const std::string& name : theirs)
      if (lacks(first, name)) refuse(name, rank, 0);
    if (theirs != first)
      throw CommError(str("rank ", rank,
                          "'s module has its buffers in another order than rank 0's: all ranks "
                          "must register the same buffers"));
  }
}

void ShardedModel::broadcast_buffers() {
  if (comm_->size() == 1 || state_ == nullptr) return;
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const std::vector<NamedTensor> mine = buffers();
  for (const auto& [name, tensor] : mine)
    if (const std::string why = no_bytes(tensor); !why.empty())
      throw Error(str("buffer ", name, " ", why,
                      " and cannot be sent to other ranks: register a dense tensor of plain numbers"));
  const std::vector<std::string> by_rank = comm_->exchange(describe(mine), "buffers");
  check_same_buffers(by_rank);
  const std::vector<std::pair<std::string, BufferKind>> first = parse_buffers(by_rank[0]);
  for (size_t i = 0; i < mine.size(); ++i) {
    const BufferKind& kind = first[i].second;
    const at::Tensor& buffer = mine[i].tensor;
    // A collective needs memory of its own: another buffer may share this one's.
    at::Tensor bytes = comm_->rank() == 0 ? bytes_of_elements(buffer.to(options_.device)).clone()
                                          : at::empty({c10::multiply_integers(kind.shape) *
                                                       static_cast<int64_t>(c10::elementSize(kind.dtype))},
                                                      at::TensorOptions(at::kByte).device(options_.device));
    if (bytes.numel() > 0) comm_->broadcast(bytes, 0, "buffers")->wait();
    if (comm_->rank() != 0) write_buffer(buffer, from_bytes(bytes, kind), /*keep_dtype=*/false);
  }
}

}  // namespace tessera::zero
