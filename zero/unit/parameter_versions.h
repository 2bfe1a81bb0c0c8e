// ParameterVersions: sees that the model's parameters are still views of the units, with the values that the
// engine wrote there.
//
// [Note: who writes parameters]
// Masters, shards and what other ranks hold follow a write only inside a GatheredParameters with a
// modifier_rank, or when a checkpoint or weights are loaded. Any other write would be undone by the next
// update (16 bits), be this rank's alone (stage 0), or be gathered away (stages 1 to 3). So it is refused at
// every stage and in every dtype: by the operator that writes, also through tensor.data(), whose version
// counter is another one (OperatorListener), and by the parameters' version counters at the next call.
// Neither sees a write through a raw pointer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "zero/plan/layout.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// Notices writes into parameters that are not the engine's. Not thread-safe. `parameters[i]` is Layout
/// parameter i. Layout and units must outlive it.
class ParameterVersions {
 public:
  /// The values that the parameters have now are allowed. Each gets a version counter of its own.
  ParameterVersions(const Layout& layout, const std::vector<ParamUnit>& units,
                    std::vector<at::Tensor> parameters);

  /// The value that the parameter has now is allowed.
  void allow(int parameter);
  /// Whether it was written since, in a way that autograd has seen.
  bool was_written(int parameter) const;
  /// A GatheredParameters in which it could be written was left by an exception, and gave no rank the values.
  void leave(int parameter);
  /// The engine has written the parameter, in a way that autograd has not seen: it is told now.
  void written_by_engine(int parameter);
  /// A few loads a parameter. Throws Error naming the first parameter whose memory was replaced
  /// (model->to(), set_data()), or that was written otherwise; `replaces_values`: only the former, because
  /// the caller gives all parameters other values.
  void check(bool replaces_values) const;

 private:
  const Layout& layout_;
  const std::vector<ParamUnit>& units_;
  std::vector<at::Tensor> parameters_;
  std::vector<uint32_t> versions_;  // by parameter: its version counter after the last write that is allowed
  std::vector<bool> left_by_exception_;  // by parameter: written since, as leave() says
};

}  // namespace tessera::zero
