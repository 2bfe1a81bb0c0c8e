// ModuleState: what a module holds besides parameters, asked of the module at each use.
//
// [Note: a module's state is read when it is used]
// Code of the model may assign a buffer anew, register one, remove one, or change its shape or dtype, at any
// time. So no tensor of initialize() is kept: whatever saves, loads, or makes ranks equal asks the module by
// name. A checkpoint notes the buffers that are not as initialize() found them. Where another engine's module
// began with the same shape and dtype, loading repeats the change; elsewhere a difference is an error by
// name.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace tessera::zero {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// A name under which a module has a buffer.
struct NamedBuffer {
  std::string name;
  at::Tensor tensor;       ///< undefined: registered as None
  bool persistent = true;  ///< false: part of no state dict (register_buffer(persistent=False))
};

/// Reads and writes a module's buffers and extra state. Used by one thread.
class ModuleState {
 public:
  ModuleState() = default;
  virtual ~ModuleState() = default;
  ModuleState(const ModuleState&) = delete;

  /// All names, in the order of registration; a shared buffer under each of its names.
  virtual std::vector<NamedBuffer> buffers() const = 0;
  /// Whether assign() can make the module hold a persistent buffer of this name, or remove() it.
  virtual bool can_assign(const std::string& /*name*/) const { return false; }
  /// Registers the buffer, or gives it another tensor. Undefined: None.
  virtual void assign(const std::string& /*name*/, const at::Tensor& /*tensor*/) {}
  virtual void remove(const std::string& /*name*/) {}

  /// The names in a state dict of what modules save besides tensors (get_extra_state()).
  virtual std::vector<std::string> extra_state_names() const { return {}; }
  /// (n) uint8: all of it. Throws Error naming what cannot be stored as data.
  virtual at::Tensor extra_state() const { return {}; }
  /// Gives modules what extra_state() has returned, or, where a module's is one tensor, that tensor.
  virtual void set_extra_state(const at::Tensor& /*bytes*/) {}
  virtual void set_extra_state(const std::string& /*name*/, const at::Tensor& /*value*/) {}
};

/// `model` must outlive it.
std::shared_ptr<ModuleState> state_of(const torch::nn::Module& model);
std::shared_ptr<ModuleState> state_of(const torch::jit::Module& model);

/// The shape and dtype of a buffer.
struct BufferKind {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  bool operator==(const BufferKind&) const = default;
};
inline BufferKind kind_of(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.sizes().vec()}; }

/// Why the tensor cannot be saved or sent as bytes ("is quantized (QInt8)"); "": it can.
std::string no_bytes(const at::Tensor& tensor);
/// (bytes) uint8 on the tensor's device: its elements, row-major; the tensor's own memory where that
/// is contiguous. no_bytes() must be "".
at::Tensor bytes_of_elements(const at::Tensor& tensor);
/// The inverse: `bytes` contiguous.
at::Tensor from_bytes(const at::Tensor& bytes, const BufferKind& kind);
/// Whether write_buffer() into a buffer of type `to` keeps the meaning of values of type `from`.
bool converts(at::ScalarType from, at::ScalarType to);
/// Gives a module's tensor `value`: in place where shape and dtype are equal, or `keep_dtype`; else
/// the tensor gets other memory. The tensor stays the same one, on its device.
void write_buffer(at::Tensor tensor, const at::Tensor& value, bool keep_dtype);

/// Collective. Makes `buffers` rank 0's, in value, shape and dtype; they are on `device`, which the transport
/// takes. Those that no rank has otherwise are not sent, and not written. Throws CommError naming a buffer
/// that not all ranks have, Error for one that cannot be sent.
void broadcast_buffers(const std::vector<NamedTensor>& buffers, comm::Communicator& comm, at::Device device);

}  // namespace tessera::zero
