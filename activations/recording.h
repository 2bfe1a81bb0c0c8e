// Recording: what is known of one model's forward while it runs: which operator made which tensor, and what
// autograd saved. It decides for each saved tensor whether it is kept, by its policy.
//
// It is knowledge only: a tensor it does not know (made before the forward, by an operator that is not known,
// by code that calls no operators, or written through a view) is kept like any other. What it knows wrongly
// it notices by the tensors' versions ([Note: written in place]) and digests ([Note: verification] in
// value.h).
//
// [Note: written in place]
// An operator that writes into its argument makes a new Value for the same tensor, so that
//   u = addmm(…); relu_(u)
// has two, and the second can be made from the first. All else that shares the memory (views, or the tensor
// that this one is a view of) is no longer known. What is kept to be computed from is copied before it is
// written, by whatever thread and until backward is over. While an operator that writes runs, its memory is
// neither the old value nor the new one: what autograd reads of it meanwhile is not recorded. Autograd does
// not compare versions where hooks are set, so SavedTensor does.
//
// Memory that numpy or another library has (is_shared_memory()) may change at any time, and versions say
// nothing. What is computed from it is computed again from a copy, made when the operator reads it; equal
// reads share one. Small tensors from outside of the forward are copied alike: a graph of torch.compile
// updates buffers without any operator.
//
// Where a saved tensor cannot be written it stays in memory, and nothing more is offloaded in this forward.
// end_pass() throws the reason.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "activations/policy.h"
#include "activations/value.h"

namespace tessera::activations {

/// Longer chains of cheap operators are not looked at: they would cost more to make than a step can bear.
inline constexpr int kMaxCheapDepth = 32;

class Recording;

/// Stands for a tensor that autograd has saved, and gives it back in backward. Thread-safe.
class SavedTensor {
 public:
  /// Keeps `tensor`. `recording`: null where it is outside of every forward.
  SavedTensor(std::shared_ptr<Recording> recording, const at::Tensor& tensor);
  /// The tensor, or the same bits made again. Throws Error when it was written in place since (as autograd
  /// does without hooks), and what recomputation throws.
  at::Tensor unpack();

 private:
  friend class Recording;
  std::shared_ptr<Recording> recording_;
  at::Tensor tensor_;  // kept
  ValuePtr value_;     // null: not known
  c10::VariableVersion counter_;
  uint32_t version_;
};

/// An operator that runs. Lives from its start to its end.
struct RunningOperator final : at::ObserverContext {
  std::shared_ptr<Recording> recording;
  RunningOperator* outer = nullptr;  ///< the one that called it
  const OperatorFacts* facts = nullptr;
  std::shared_ptr<Call> call;  ///< null: not recorded
  std::vector<at::Tensor> written;
  std::vector<const void*> marked;  ///< storages of `written` that are in Recording::being_written_
  struct Result {
    std::shared_ptr<SavedTensor> saved;
    const void* tensor;
  };
  std::vector<Result> saved_results;  ///< saved by autograd while it runs: what it made is not known yet
  int64_t started_at = 0;
};

/// Counts what the last forward that has ended did.
struct Counts {
  int64_t kept_bytes = 0;       ///< of saved tensors, each memory once; parameters not counted
  int64_t dropped_bytes = 0;    ///< of saved tensors that were not kept
  int64_t offloaded_bytes = 0;  ///< each memory once
  int64_t num_kept = 0, num_dropped = 0, num_offloaded = 0;
  Work work;  ///< of all backward passes so far
};

/// Records the calls of a forward, decides what of it is kept, and runs calls again in backward. Called by
/// the thread that runs the forward, and by those that run backward.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  explicit Recording(PolicyOptions options);

  // -- while the forward runs; `running` is the innermost operator of the thread --
  /// An outermost operator reads a parameter of this block (-1: of none).
  void enter_block(int block, int parameter);
  void operator_started(RunningOperator& running, c10::ArrayRef<const c10::IValue> inputs);
  void operator_ended(RunningOperator& running, const std::vector<c10::IValue>& results);
  std::shared_ptr<SavedTensor> save(const at::Tensor& tensor, RunningOperator* running);
  /// An operator that is not recorded is about to write these: of another thread or another model, or called
  /// by one that is not known.
  void written_elsewhere(const std::vector<at::Tensor>& tensors);

  /// The engine's own call of the model begins: what was heard before is no part of the forward, if autograd
  /// has saved nothing yet.
  void begin_forward();

  // -- between passes --
  /// The forward has ended. Throws DiskError.
  void end_pass();
  Counts counts() const;

  at::Tensor make_again(const ValuePtr& value);

 private:
  /// What is known of a tensor: owned here while the tensor is all that it stands for; a kept Value would
  /// keep its tensor for ever.
  struct Known {
    ValuePtr owned;
    std::weak_ptr<Value> seen;
    ValuePtr get() const { return owned ? owned : seen.lock(); }
  };
  /// A storage that lies on disk, and since when.
  struct OnDisk {
    std::weak_ptr<SpillBlock> block;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    uint32_t version = 0;
    int64_t made_at = 0;
  };
  ValuePtr find(const at::Tensor& tensor) const;
  ValuePtr find(const at::Tensor& tensor, const void* key) const;
  ValuePtr remember(const at::Tensor& tensor);
  ValuePtr input_value(const at::Tensor& tensor);
  ValuePtr copied_value(const at::Tensor& tensor);
  void take_digest(Value& value, const at::Tensor& tensor);
  bool is_being_written(const at::Tensor& tensor) const;
  void begin_writing(RunningOperator& running);
  void end_writing(RunningOperator& running);
  void choose_verifying();
  void hold(const ValuePtr& value, const at::Tensor& tensor);
  void disown(const Value& value);
  bool memory_is_kept(const void* storage) const;
  void count_kept(const at::Tensor& tensor);
  void copy_before_writing(const at::Tensor& tensor);
  bool wants(const OperatorFacts& facts) const;
  void add_input(RunningOperator& running, size_t argument, int64_t position, const at::Tensor& tensor);
  void note_written(RunningOperator& running);
  void add_result(RunningOperator& running, const at::Tensor& tensor, size_t index);
  void settle(SavedTensor& saved, const ValuePtr& value, const at::Tensor& tensor);
  bool leaves_memory(const ValuePtr& value, const at::Tensor& tensor);
  bool offload(const ValuePtr& value, const at::Tensor& tensor);
  Fate decide(const ValuePtr& value);
  bool can_be_made(const ValuePtr& value, bool cheaply) const;
  void start_anew();
  void sweep();

  const PolicyOptions options_;
  // Guards what follows, and all Values. A thread that makes tensors again has it, and may wait for other
  // ranks.
  mutable std::recursive_mutex mutex_;
  std::unordered_map<const void*, Known> known_;         // by tensor
  std::unordered_map<const void*, int64_t> last_write_;  // by storage
  // Guards kept_ alone, beside mutex_: others look whether it has what they write.
  mutable std::mutex kept_mutex_;
  std::unordered_map<const void*, std::vector<std::weak_ptr<Value>>> kept_;  // by storage
  std::unordered_map<const void*, OnDisk> on_disk_;                          // by storage
  std::vector<const void*> being_written_;  // storages, by operators that run; some more than once
  /// Copies of memory of others and of small tensors, by digest and strides.
  std::map<std::pair<uint64_t, std::vector<int64_t>>, std::weak_ptr<Value>> copies_;
  int64_t passes_ = 0;
  bool verifying_ = false;                          // this pass is verified
  std::shared_ptr<const KernelSettings> settings_;  // of the last call
  std::unordered_set<const void*> counted_;         // storages, in counts_.kept_bytes
  int64_t clock_ = 0;                               // of operators' starts and ends
  size_t swept_size_ = 256;
  int segment_ = 0, block_ = -1, block_entry_ = -1;
  Counts counts_, last_;
  std::shared_ptr<TensorSpill> spill_;
  std::exception_ptr failure_;  // of a disk that is full, as said above
};

}  // namespace tessera::activations
