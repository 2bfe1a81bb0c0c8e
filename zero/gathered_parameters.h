// GatheredParameters: whole parameters in hand, for initialisation, inspection and code that uses raw
// pointers. Follows deepspeed.zero.GatheredParameters(params, modifier_rank).
//
//   tessera::zero::GatheredParameters gathered(engine->sharded_model(), {"head.weight"},
//                                              /*modifier_rank=*/0);
//   if (engine->rank() == 0) torch::nn::init::zeros_(model->head->weight);
//   gathered.close();
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "zero/sharded_model.h"

namespace tessera::zero {

/// Keeps whole parameters readable, and writable, during its lifetime. Not thread-safe. Constructing and
/// closing are collective: all ranks, the same names, the same modifier_rank.
class GatheredParameters {
 public:
  /// Collective. `names`: parameters (aliases too); empty: all of them. With `modifier_rank`, what that rank
  /// writes is broadcast on close and becomes every rank's value, fp32 masters included; without it, writes
  /// are refused. Throws Error for an unknown name, CommError.
  GatheredParameters(ShardedModel& model, const std::vector<std::string>& names,
                     std::optional<int> modifier_rank = std::nullopt);
  /// Closes, unless an exception is on its way (then the ranks no longer agree). A failure to close
  /// is rethrown by the engine's next call.
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;

  /// Collective. Throws CommError. Calling it again does nothing.
  void close();
  /// Closes without giving anyone what was written: after an error, when the ranks no longer agree.
  void abandon();

 private:
  ShardedModel& model_;
  std::vector<int> units_;
  int modifier_rank_ = -1;
  bool open_ = true;
  int exceptions_before_;
};

}  // namespace tessera::zero
