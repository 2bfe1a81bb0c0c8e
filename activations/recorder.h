// Recorder: gives the operators and the saved tensors of this process to the Recordings of its models. A
// thread begins to record when an operator on it reads a parameter of a model that trains, so a model may be
// called in any way and by any thread; it stops at the model's backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

#include "activations/recording.h"
#include "zero/operators/tap.h"
#include "zero/plan/layout.h"

namespace tessera::zero {
class Residency;
}

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

/// Gives the operators of a model that trains to its Recording. While one lives, the operators of all threads
/// are heard, but for those that repeat what was computed before (zero::RepeatedOperators).
class Recorder {
 public:
  explicit Recorder(std::shared_ptr<RecordedModel> model);
  ~Recorder();
  Recorder(const Recorder&) = delete;

 private:
  std::shared_ptr<RecordedModel> model_;
  zero::Hearing hearing_;
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
