// OperatorListener: tells the Residency which units an operator is about to read or write.
//
// Composite operators (linear, lstm, convolution, layer_norm …) read several tensors inside. Units touched by
// an operator, or by the operators it calls, stay unsharded until the outermost call has returned.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <optional>
#include <vector>

#include "zero/operators/tap.h"

namespace tessera::zero {

/// While one lives, the operators of all threads of the process are heard: a model may be run by another
/// thread than the one that made its engine. Several may live at once.
class OperatorListener {
 public:
  /// `casts`: also track low-precision copies of parameters (needed under autocast with sharded parameters;
  /// costs a little more an operator).
  explicit OperatorListener(bool casts);
  ~OperatorListener();
  OperatorListener(const OperatorListener&) = delete;
  OperatorListener& operator=(const OperatorListener&) = delete;

 private:
  Hearing hearing_;
};

/// Announces the units that a graph of torch.compile reads. While one lives, a graph of torch.compile that
/// nothing else announces runs on this thread: the units of its inputs stay unsharded. See [Note: compiled
/// graphs] in compiled_graphs.h. Does nothing inside of an operator that is heard, whose inputs have them
/// all. Ends on the thread that it began on.
class CompiledGraphRead {
 public:
  /// Collective where it gathers. Of the inputs only parameters count.
  explicit CompiledGraphRead(const std::vector<at::Tensor>& inputs);
  CompiledGraphRead(const CompiledGraphRead&) = delete;
  CompiledGraphRead& operator=(const CompiledGraphRead&) = delete;

 private:
  std::optional<at::RecordFunction> event_;
};

}  // namespace tessera::zero
