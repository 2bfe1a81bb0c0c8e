// The groups of ranks that a configuration asks for.
#pragma once

#include <algorithm>

#include "engine/config/config.h"
#include "zero/plan/mesh.h"

namespace tessera {

/// What mics_shard_size and zero_hpz_partition_size say. One rank alone is any group.
inline zero::GroupSizes groups_of(const ZeroConfig& zero, int world_size) {
  if (world_size == 1) return {};
  return {.shard = std::max(0, zero.mics_shard_size),
          .secondary = zero.hpz_partition_size > 1 ? zero.hpz_partition_size : 0};
}

}  // namespace tessera
