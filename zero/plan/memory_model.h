// The bytes of model state a rank holds, by arithmetic alone: the table at the top of docs/architecture.md.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "zero/plan/layout.h"
#include "zero/plan/mesh.h"
#include "zero/plan/placement.h"
#include "zero/plan/stage.h"

namespace tessera::zero {

/// Bytes on one rank. `parameters` + `gradients` + `master` + `optimizer` is the model state; `snapshot`
/// comes on top where checkpoints are written asynchronously.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t master = 0;     ///< fp32 weights beside bf16/fp16 parameters, or on the host beside the device's
  int64_t optimizer = 0;  ///< moments
  int64_t snapshot = 0;   ///< the copy that asynchronous checkpoints are written from
  int64_t total() const { return parameters + gradients + master + optimizer + snapshot; }
  bool operator==(const StateBytes&) const = default;
  StateBytes& operator+=(const StateBytes& other) {
    parameters += other.parameters;
    gradients += other.gradients;
    master += other.master;
    optimizer += other.optimizer;
    snapshot += other.snapshot;
    return *this;
  }
};

struct StateModel {
  Sharding sharding;
  DType accumulate_dtype = DType::kFloat32;  ///< gradients
  /// Ranks share memory: trainable parameters exist once as soon as the optimizer is sharded.
  bool one_copy_a_host = false;
  int ranks_a_host = 0;            ///< that share the copy; 0: all
  int num_states = 2;              ///< fp32 moments an element (Adam: 2)
  bool async_checkpoints = false;  ///< a copy of this rank's shards is set aside
  Tiers tiers = {};
  GroupSizes groups = {};  ///< see mesh.h
};

/// Elements of one dtype, and a rank's part of them.
struct StateElements {
  int64_t numel = 0;
  int64_t shard_numel = 0;      ///< of a copy that all ranks, or the groups of GroupSizes::shard, have
  int64_t piece_numel = 0;      ///< of what all ranks have
  int64_t secondary_numel = 0;  ///< of the second copy, where there is one
  DType dtype = DType::kFloat32;
  bool trainable = true;
};

/// What a rank holds of them on `tier`, between steps.
inline StateBytes state_bytes(const StateElements& whole, const StateModel& model,
                              Tier tier = Tier::kDevice) {
  StateBytes bytes;
  const auto held = [&](bool sharded) { return sharded ? whole.shard_numel : whole.numel; };
  const Placement placement = placement_of(model.sharding, whole.trainable, model.one_copy_a_host,
                                           model.tiers, model.groups.secondary > 0);
  if (placement.values == tier)
    bytes.parameters = held(placement.parameters != Placement::Parameters::kWhole) * size_bytes(whole.dtype);
  if (placement.second_copy && tier == Tier::kDevice)
    bytes.parameters += whole.secondary_numel * size_bytes(whole.dtype);
  if (placement.host_shared() && placement.values == tier && model.ranks_a_host > 0)
    bytes.parameters = (whole.numel * size_bytes(whole.dtype) + model.ranks_a_host - 1) / model.ranks_a_host;
  if (model.async_checkpoints && tier == Tier::kDevice) {
    const int64_t element =
        whole.trainable ? (1 + model.num_states) * size_bytes(DType::kFloat32) : size_bytes(whole.dtype);
    bytes.snapshot = whole.piece_numel * element;
  }
  if (!whole.trainable) return bytes;
  if (placement.gradient == tier)
    bytes.gradients = held(placement.gradient_sharded) * size_bytes(model.accumulate_dtype);
  if (placement.optimizer != tier) return bytes;
  const int64_t fp32_bytes = held(placement.updates_shard) * size_bytes(DType::kFloat32);
  if (whole.dtype != DType::kFloat32 || placement.copies_masters_to_device()) bytes.master = fp32_bytes;
  bytes.optimizer = model.num_states * fp32_bytes;
  return bytes;
}

/// `numel` elements over `world` ranks; rounded up where they do not divide.
inline StateElements elements_of(int64_t numel, int64_t world, DType dtype, bool trainable,
                                 GroupSizes groups) {
  const auto part = [&](int64_t size) { return (numel + size - 1) / size; };
  return {.numel = numel,
          .shard_numel = part(groups.shard > 0 ? groups.shard : world),
          .piece_numel = part(world),
          .secondary_numel = groups.secondary > 0 ? part(groups.secondary) : 0,
          .dtype = dtype,
          .trainable = trainable};
}

/// Padding included, so it is exact.
inline StateBytes model_state_bytes(const Layout& layout, const StateModel& model,
                                    Tier tier = Tier::kDevice) {
  StateBytes bytes;
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    const UnitSpec& whole = layout.units()[unit];
    bytes +=
        state_bytes(elements_of(whole.numel, layout.world_size(), whole.dtype, whole.trainable, model.groups),
                    model, tier);
  }
  return bytes;
}

/// Is for a model of which only the number of (trainable) parameters is known. Leaves out padding, which
/// depends on the layout. With bf16, gradients accumulated in bf16 and Adam's two moments these are the
/// numbers of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
/// (2020), figure 1: 16 bytes a parameter.
inline StateBytes estimate_state_bytes(int64_t num_parameters, int world_size, DType dtype,
                                       const StateModel& model, Tier tier = Tier::kDevice) {
  return state_bytes(elements_of(num_parameters, world_size, dtype, true, model.groups), model, tier);
}

/// The smallest world, up to `num_parameters` ranks, of which `fits(world)` is true; it is
/// true of all larger ones then. 0: none.
template <class Fits>
int64_t smallest_fitting_world(int64_t num_parameters, const Fits& fits) {
  int64_t high = 1;
  while (!fits(high) && high < num_parameters && high < (int64_t{1} << 30)) high *= 2;
  if (!fits(high)) return 0;
  int64_t low = high / 2;  // does not fit, unless it is 0
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return high;
}

/// The smallest world in which a rank's model state is at most `budget_bytes`; 0: in none, because
/// what the stage does not shard is more.
inline int64_t smallest_world(int64_t num_parameters, DType dtype, const StateModel& model,
                              int64_t budget_bytes) {
  return smallest_fitting_world(num_parameters, [&](int64_t world) {
    return estimate_state_bytes(num_parameters, static_cast<int>(world), dtype, model).total() <=
           budget_bytes;
  });
}

}  // namespace tessera::zero
