// Recorder: while it stands, operators of this thread are recorded instead of run.
//
// Every operator that this thread calls comes here first, by the dispatch key DeferredInit. (The idea, and
// the key, are torchdistX's.) Composite operators are let through: those that they call come here. Views are
// made, of tensors without memory too: they only change shapes. What is left computes: it is run on meta
// tensors, for the shapes of its results, and recorded. It is run at once
// - if it has all its values and makes little: raw pointers to small tensors (at::accessor) work as ever;
// - if somebody needs values from it (Tensor::item()), or autograd has to see it, or its results' shapes
//   depend on values, or it has no kernel for meta tensors. What it reads is computed before.
// - if it writes memory that others than operators may write too: memory from outside, and memory to which
//   somebody has a pointer ([Note: raw pointers to memory that is there]).
// What others than operators may write is copied when an operator that reads it is recorded. Of large tensors
// from outside that libtorch allocated, a reference is kept, with the tensor's version and a hash of its
// values: if these have changed when recording ends, the model is made in the ordinary way. A raw pointer to
// a tensor without memory throws.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "zero/deferred/operator_log.h"
#include "zero/deferred/operator_traits.h"

namespace tessera::zero::deferred {

/// Records the operators of this thread instead of running them. One a thread at a time. The log must outlive
/// it.
class Recorder {
 public:
  explicit Recorder(OperatorLog& log);
  ~Recorder();
  Recorder(const Recorder&) = delete;

  /// The fallback of the dispatch key. `below`: the keys that come after it.
  void handle(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack);

 private:
  struct Call;
  void run_as_it_is(const Call& call);
  bool is_exposed(const at::Tensor& tensor) const;
  void run_now(const Call& call);
  bool needs_now(const Call& call) const;
  bool may_run_now(const Call& call, int64_t output_bytes);
  std::optional<std::vector<at::Tensor>> infer(const Call& call) const;
  void record(const Call& call, const std::vector<at::Tensor>& shapes);
  void make_uninitialized(const Call& call);
  void resize(const Call& call);
  int stream_of(const Call& call);
  at::Tensor keep(const at::Tensor& tensor, RecordedOperator& recorded);
  void count_small(const torch::jit::Stack& results);

  OperatorLog& log_;
  Recorder* outer_;
  c10::impl::IncludeDispatchKeyGuard hear_operators_;
  struct Small {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes;
  };
  // Made here, with memory. The weak reference keeps the address from being used again.
  std::unordered_map<const c10::StorageImpl*, Small> small_;
  int64_t small_bytes_ = 0;
};

}  // namespace tessera::zero::deferred
