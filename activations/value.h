// Value and Call: what the operators of a forward made, and how to make it again. A Value is one tensor at
// one moment: an operator that writes in place makes a new Value. It is kept (its memory is held), on disk,
// or has a producer, the call that makes it again; or none of these, when nothing can bring it back.
//
// Ownership runs backwards: a saved tensor owns its Value, a Value its producer, a Call the Values it reads.
// So whatever no saved tensor needs is freed by itself. A Value that is kept or on disk needs no producer and
// has none: that cuts the chains.
//
// [Note: verification]
// In a pass that is verified (policy.h: verify) each tensor that an operator reads or autograd saves has the
// digest of its elements taken, and what backward makes again is compared with it. A difference means that an
// operator was taken for functional and is not, or that the call lacks something of what the operator reads;
// make() throws then, and names the operator and what differs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "activations/kernel_settings.h"
#include "activations/operator_facts.h"
#include "activations/tensor_spill.h"

namespace tessera::activations {

struct Call;

/// What a tensor was: equal digests are equal bits.
struct Digest {
  uint64_t hash = 0;  ///< 64-bit XXH3 of the elements, in their order by index, and of shape and type
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  bool operator==(const Digest&) const = default;
};

struct Value {
  Value() = default;
  ~Value();
  Value(const Value&) = delete;

  at::Tensor kept;          ///< without autograd's history; undefined: not held
  uint32_t version = 0;     ///< of `kept` when it was taken
  bool recomputed = false;  ///< `kept` was made by make()
  bool handed_out = false;  ///< and given to a function's backward, which may write it
  std::optional<SpilledTensor> on_disk;
  std::shared_ptr<Call> producer;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> alive{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  ///< the model's own tensor
  const void* tensor = nullptr;                                          ///< the same, as a key
  uint32_t made_version = 0;                                             ///< of that tensor
  const void* storage = nullptr;
  int64_t bytes = 0;
  int64_t made_at = 0;     ///< by a counter of operators
  int segment = 0;         ///< of the forward: see Blocks
  bool is_result = false;  ///< of an operator of the pass
  int depth = 0;           ///< calls from here to what is kept
  /// The digest of its elements when an operator read it or autograd saved it: see [Note: verification].
  std::optional<Digest> digest;
  bool dropped = false;  ///< autograd saved it, and it was not kept

  /// Nothing needs to be computed to have it.
  bool available() const { return kept.defined() || on_disk.has_value(); }
};
using ValuePtr = std::shared_ptr<Value>;

/// One call of an operator.
struct Call {
  struct Input {
    size_t argument;
    int64_t position;  ///< in a list of tensors; -1: the argument itself
    ValuePtr value;
    bool wrapped_number;  ///< made of a number of Python or C++: its dtype gives way to that of tensors
  };
  const OperatorFacts* facts = nullptr;
  std::vector<c10::IValue> arguments;  ///< without the tensors
  std::vector<Input> inputs;
  /// Describes the argument that the operator overwrites without reading it; fresh memory takes its place.
  struct Blank {
    std::vector<int64_t> sizes, strides;
    at::TensorOptions options;
  };
  std::optional<Blank> overwritten;
  std::vector<std::weak_ptr<Value>> outputs;  ///< results, lists flattened
  std::optional<at::Generator> generator;     ///< a copy, as it was before the call
  at::Device device = at::kCPU;
  std::shared_ptr<const KernelSettings> settings;  ///< when it was called; shared by calls
};

/// `tensor`'s memory without autograd's history. No operator is called.
at::Tensor alias_of(const at::Tensor& tensor);
/// A copy with memory of its own, with the strides of `tensor` and its alignment (to 64 bytes):
/// kernels choose their way by these. No operator is heard.
at::Tensor copy_of(const at::Tensor& tensor);
/// No operator is heard.
Digest digest_of(const at::Tensor& tensor);
/// Copies the generator's state into the call of a random operator that is about to run.
void remember_generator(Call& call);
/// Holds `tensor`, which is the Value's, and forgets the producer.
void keep(Value& value, const at::Tensor& tensor);

/// Null: none.
c10::StorageImpl* storage_of(const at::Tensor& tensor);
/// Dense tensors with memory of their own kind: all else (sparse ones, tensors of functional
/// transforms, …) is kept.
bool supported(const at::Tensor& tensor);
bool is_parameter(const at::Tensor& tensor);
/// Memory that numpy has, or that is not libtorch's own: it may be written without any operator.
bool is_shared_memory(const at::Tensor& tensor);

/// The tensors among results, lists flattened; undefined where a result is no tensor.
std::vector<at::Tensor> flatten(const std::vector<c10::IValue>& results);

struct Work {
  int64_t num_calls = 0;
  int64_t num_verified = 0;  ///< tensors that were compared with their digest
  double call_seconds = 0;   ///< on a device that runs asynchronously: to launch them
  double read_seconds = 0;   ///< that were waited for
};

/// Brings the value back where it is not kept: reads it from disk, or runs the calls that lead to it,
/// below autograd and with the settings of their time, and keeps what they make for whoever else needs it.
/// `work`: increased by what it took. Throws Error when the value cannot be made, because what it is made of
/// was written in place since, or when what was made differs from its digest, and DiskError.
at::Tensor make(const ValuePtr& value, Work& work);

}  // namespace tessera::activations
