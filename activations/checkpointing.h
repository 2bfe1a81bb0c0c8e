// Checkpointing: activation recomputation (gradient checkpointing) of one model, as it is: nothing of it is
// wrapped. Autograd asks what to save; operators that ran are known by at::RecordFunction; what is dropped is
// made again in backward by calling them once more, with the same arguments and generator states, so
// gradients are the same to the bit. What is offloaded is read back from disk.
//
// A thread begins to record when an operator on it reads a parameter of a model that trains, so a model may
// be called in any way and by any thread; it stops at the model's backward.
//
// After: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

#include "activations/policy.h"
#include "activations/recording.h"
#include "zero/operators/tap.h"
#include "zero/plan/layout.h"
#include "zero/sharded_model.h"

namespace tessera::activations {

/// A model as operators show it.
struct RecordedModel {
  std::shared_ptr<Recording> recording;
  const zero::Residency* residency = nullptr;  ///< the one that its units point to
  const zero::Layout* layout = nullptr;        ///< used while it is active
  std::vector<int> blocks;                     ///< by parameter; -1: none
  std::atomic<int64_t> pass{0};                ///< a thread records for the pass in which it began
  std::atomic<bool> active{true};              ///< the model trains
};

/// Applies the recomputation policy to the forwards of one model. Used by the thread that uses the
/// ShardedModel. While one lives, the operators of all threads are heard, but for those that repeat what was
/// computed before (zero::RepeatedOperators).
class Checkpointing {
 public:
  /// Takes effect from the next forward on. `install_hooks` is false in a process of Python, where the caller
  /// pushes hooks that call save_on_this_thread(). The model must outlive it.
  Checkpointing(zero::ShardedModel& model, const PolicyOptions& options, bool install_hooks = true);
  ~Checkpointing();
  Checkpointing(const Checkpointing&) = delete;

  /// Is called before a forward that the engine calls; a model may also be called without it.
  void begin_forward() { recorded_->recording->begin_forward(); }
  /// To be called before backward. Throws DiskError where saved tensors go to disk.
  void end_forward();
  /// In evaluation nothing is recorded.
  void set_training(bool training) { recorded_->active = training; }

  /// Returns the counts of the last forward.
  Counts counts() const { return recorded_->recording->counts(); }
  /// Of the model, whether they count or not.
  int num_blocks() const { return num_blocks_; }

 private:
  std::shared_ptr<RecordedModel> recorded_;
  zero::Hearing hearing_;
  int num_blocks_ = 0;
};

/// What stands for `tensor` in autograd's graph: of the model that this thread is in the forward of;
/// null when it is in none.
std::shared_ptr<SavedTensor> save_on_this_thread(const at::Tensor& tensor);
/// Whether this thread is in the forward of a model.
bool records_on_this_thread();

/// From now on autograd asks us what to save, on all threads. Must not be called in a process of Python,
/// whose own engine has this place.
void install_autograd_hooks();

}  // namespace tessera::activations
