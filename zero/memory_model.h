// The bytes of model state a rank holds, by arithmetic alone: the table at the top of docs/architecture.md.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "zero/layout.h"
#include "zero/stage.h"

namespace tessera::zero {

/// Bytes on one rank. `parameters` + `gradients` + `master` + `optimizer` is the model state; `snapshot` comes on top where
/// checkpoints are written asynchronously.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t master = 0;     ///< fp32 weights beside bf16/fp16 parameters
  int64_t optimizer = 0;  ///< moments
  int64_t snapshot = 0;   ///< the copy that asynchronous checkpoints are written from
  int64_t total() const { return parameters + gradients + master + optimizer + snapshot; }
  bool operator==(const StateBytes&) const = default;
};

struct StateModel {
  Sharding sharding;
  DType accumulate_dtype = DType::kFloat32;  ///< gradients
  bool one_copy_a_host = false;  ///< ranks share memory: trainable parameters exist once as soon as the optimizer is sharded
  int num_states = 2;                        ///< fp32 moments an element (Adam: 2)
  bool async_checkpoints = false;            ///< a copy of this rank's shards is set aside
};

/// Local. Padding included, so it is exact.
inline StateBytes model_state_bytes(const Layout& layout, const StateModel& model) {
  StateBytes bytes;
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    const Unit& whole = layout.units()[unit];
    const auto held = [&](bool sharded) { return sharded ? layout.shard_numel(unit) : whole.numel; };
    const bool parted = model.sharding.parameters || (model.one_copy_a_host && model.sharding.optimizer && whole.trainable);
    bytes.parameters += held(parted) * size_bytes(whole.dtype);
    if (model.async_checkpoints) {
      const int64_t element = whole.trainable ? (1 + model.num_states) * size_bytes(DType::kFloat32) : size_bytes(whole.dtype);
      bytes.snapshot += layout.shard_numel(unit) * element;
    }
    if (!whole.trainable) continue;
    bytes.gradients += held(model.sharding.gradients) * size_bytes(model.accumulate_dtype);
    const int64_t fp32_bytes = held(model.sharding.optimizer) * size_bytes(DType::kFloat32);
    if (whole.dtype != DType::kFloat32) bytes.master += fp32_bytes;
    bytes.optimizer += model.num_states * fp32_bytes;
  }
  return bytes;
}

}  // namespace tessera::zero
