// Placement: where the values of one unit are between uses, and which part of them this rank updates. A
// value, computed once a unit, from the stage's Sharding and from whether the ranks share memory.
#pragma once

#include "zero/stage.h"

namespace tessera::zero {

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
  bool gradient_sharded = false;  ///< gradients accumulate in this rank's shard

  bool sharded() const { return parameters == Parameters::kSharded; }
  bool host_shared() const { return parameters == Parameters::kHostShared; }
  bool operator==(const Placement&) const = default;
};

/// Local. Of a trainable or a frozen unit. `one_copy_a_host`: the ranks share memory.
constexpr Placement place(Sharding sharding, bool trainable, bool one_copy_a_host) {
  Placement placement;
  placement.updates_shard = sharding.updates_shard(trainable);
  placement.gradient_sharded = trainable && sharding.gradients;
  if (placement.updates_shard && one_copy_a_host) {
    placement.parameters = Placement::Parameters::kHostShared;
  } else if (sharding.parameters) {
    placement.parameters = Placement::Parameters::kSharded;
  }
  return placement;
}

}  // namespace tessera::zero
