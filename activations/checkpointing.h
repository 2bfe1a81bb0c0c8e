// Checkpointing: activation recomputation (gradient checkpointing) of one model, as it is: nothing of it is
// wrapped. Autograd asks what to save; operators that ran are known by at::RecordFunction; what is dropped is
// made again in backward by calling them once more, with the same arguments and generator states, so
// gradients are the same to the bit. What is offloaded is read back from disk.
//
// After: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
#pragma once

#include <memory>

#include "activations/policy.h"
#include "activations/recorder.h"
#include "activations/recording.h"
#include "zero/sharded_model.h"

namespace tessera::activations {

/// Applies the recomputation policy to the forwards of one model. Used by the thread that uses the
/// ShardedModel.
class Checkpointing {
 public:
  /// Takes effect from the next forward on. `install_hooks` is false in a process of Python, where the caller
  /// pushes hooks that call save_on_this_thread(). The model must outlive it.
  Checkpointing(zero::ShardedModel& model, const PolicyOptions& options, bool install_hooks = true);

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
  Recorder recorder_;
  int num_blocks_ = 0;
};

}  // namespace tessera::activations
