// FlopCounter: floating-point operations of what this process computes, counted operator by operator from the
// shapes, as torch.utils.flop_counter counts them.
#pragma once

#include <atomic>
#include <cstdint>

#include "zero/operators/tap.h"

namespace tessera {

/// A multiplication and an addition are two operations.
struct Flops {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t total() const { return forward + backward; }
  bool operator==(const Flops&) const = default;
};

/// Counts from its construction on: products of matrices (mm, addmm, bmm, baddbmm), convolutions and scaled
/// dot-product attention, in forwards that record a graph, and in backward. Other operators need few
/// operations and are not counted; neither are fused recurrent layers and compiled graphs. What is computed a
/// second time (recomputed activations, torch.utils.checkpoint, the scores in attention's backward) counts
/// once: these are a model's FLOPs, the numerator of MFU. A causal mask saves none, as in
/// torch.utils.flop_counter.
///
/// Counts the operators of all threads of the process. Thread-safe.
class FlopCounter {
 public:
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  Flops flops() const { return {forward_, backward_}; }

 private:
  friend class FlopObserver;
  std::atomic<int64_t> forward_{0}, backward_{0};
  zero::Hearing hearing_;
};

}  // namespace tessera
