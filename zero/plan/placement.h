// Placement: where a unit's state is between uses, and which part of it this rank updates. A value, computed
// once a unit, from the stage's Sharding, from the tiers, and from whether the ranks share memory.
#pragma once

#include "zero/plan/stage.h"

namespace tessera::zero {

/// Where state lies that is not in use.
enum class Tier {
  kDevice,  ///< in the memory of the rank's device
  kHost,    ///< in the host's memory, where that is not the device's
  kDisk,    ///< in a file: see [Note: state on disk] in offload_store.h
};

/// DeepSpeed's offload_param and offload_optimizer.
struct Tiers {
  Tier parameters = Tier::kDevice;  ///< of sharded units alone
  Tier optimizer = Tier::kDevice;   ///< fp32 masters beside the values, optimizer states, sharded gradients
  /// The device's memory is not the host's. What is below the device is then copied up and down, and updated
  /// on the host: see [Note: state on the host] in param_unit.h.
  bool device_memory_is_separate = false;
  bool any_on_disk() const { return parameters == Tier::kDisk || optimizer == Tier::kDisk; }
  bool any_below_device() const { return parameters != Tier::kDevice || optimizer != Tier::kDevice; }
  bool operator==(const Tiers&) const = default;
};

struct Placement {
  enum class Parameters {
    kWhole,       ///< this rank has all of the unit, in a buffer of its own
    kSharded,     ///< this rank has its shard; the unit gets a buffer while it is unsharded
    kHostShared,  ///< the ranks of this host have one copy of the unit: see [Note: one copy on a host]
  };
  Parameters parameters = Parameters::kWhole;
  /// This rank updates its shard alone: after an update the others' shards are gathered, or, where the copy
  /// is shared, waited for. False: it updates the whole unit, as every rank does.
  bool updates_shard = false;
  bool gradient_sharded = false;   ///< gradients accumulate in this rank's shard
  bool second_copy = false;        ///< of the parameters, in shards of a smaller group: mesh.h
  Tier values = Tier::kDevice;     ///< of this rank's shard
  Tier optimizer = Tier::kDevice;  ///< of masters beside the values, and of optimizer states
  Tier gradient = Tier::kDevice;
  bool device_memory_is_separate = false;  ///< see Tiers

  /// What lies in the host's memory, or passes through it, and is not what the device reads.
  bool on_host(Tier tier) const { return device_memory_is_separate && tier != Tier::kDevice; }
  /// The update is computed on the host from masters there; the values lie on the device.
  bool copies_masters_to_device() const { return on_host(optimizer) && !on_host(values); }

  bool sharded() const { return parameters == Parameters::kSharded; }
  bool host_shared() const { return parameters == Parameters::kHostShared; }
  bool operator==(const Placement&) const = default;
};

/// The placement of a trainable or a frozen unit. `one_copy_a_host`: the ranks share memory (which stays in
/// memory: what is on disk is each rank's own). `second_copy`: of sharded units there is one; a host's copy
/// needs none.
constexpr Placement placement_of(Sharding sharding, bool trainable, bool one_copy_a_host, Tiers tiers = {},
                                 bool second_copy = false) {
  Placement placement;
  placement.device_memory_is_separate = tiers.device_memory_is_separate;
  placement.updates_shard = sharding.updates_shard(trainable);
  placement.gradient_sharded = trainable && sharding.gradients;
  if (placement.updates_shard && one_copy_a_host && tiers.parameters == Tier::kDevice) {
    placement.parameters = Placement::Parameters::kHostShared;
  } else if (sharding.parameters) {
    placement.parameters = Placement::Parameters::kSharded;
    placement.values = tiers.parameters;
    placement.second_copy = second_copy;
  }
  if (trainable) placement.optimizer = tiers.optimizer;
  if (placement.gradient_sharded) placement.gradient = tiers.optimizer;
  return placement;
}

/// How gradients come to their sum.
enum class ReductionMode {
  kAccumulateInPlace,   ///< micro-steps add up in the whole unit's accumulator, which is reduced in place
  kAccumulateThenCopy,  ///< the same, reduced through a slot of another dtype
  kReduceEachBackward,  ///< every micro-step goes through a slot; the reduced sum is added to the accumulator
  kSingleRank,          ///< the same of one rank: see [Note: nothing to sum] in gradient_reducer.h
};

/// `placement` is that of a trainable unit. `each_micro_step`: zero_optimization.reduce_each_micro_step.
/// `same_dtype`: gradients are communicated in the dtype in which they are accumulated. `nothing_to_sum`: the
/// group is one rank, and its gradients are not scaled.
constexpr ReductionMode reduction_mode(const Placement& placement, bool each_micro_step, bool same_dtype,
                                       bool nothing_to_sum) {
  if (placement.gradient_sharded || each_micro_step)
    return nothing_to_sum && placement.gradient == Tier::kDevice ? ReductionMode::kSingleRank
                                                                 : ReductionMode::kReduceEachBackward;
  return same_dtype ? ReductionMode::kAccumulateInPlace : ReductionMode::kAccumulateThenCopy;
}
/// Whether gradients are reduced from slots ([Note: a ring of slots] in gradient_slots.h).
constexpr bool through_slots(ReductionMode mode) {
  return mode == ReductionMode::kAccumulateThenCopy || mode == ReductionMode::kReduceEachBackward;
}

}  // namespace tessera::zero
