// ShardingPlan: what a configuration means for a group of ranks: what is sharded over whom, and where it
// lies.
#pragma once

#include "engine/config/config.h"
#include "zero/plan/mesh.h"
#include "zero/plan/placement.h"
#include "zero/plan/stage.h"

namespace tessera {

struct ShardingPlan {
  zero::Sharding sharding;
  zero::GroupSizes groups;  ///< mics_shard_size and zero_hpz_partition_size; one rank alone is any group
  zero::Tiers tiers;        ///< offload_optimizer and offload_param
  int64_t unit_numel = 0;   ///< what a unit aims at: the smallest of the keys that say so
  DType compute = DType::kFloat32;
  DType accumulate = DType::kFloat32;   ///< gradients
  DType communicate = DType::kFloat32;  ///< gradients
};

/// The engine shards by it, and so does whoever computes what the engine would hold. The
/// configuration is valid by itself. `device_memory_is_separate`: the ranks' device is none whose memory is
/// the host's. Throws ConfigError that names the key of an offload which the stage, the groups or the device
/// do not allow.
ShardingPlan plan_sharding(const EngineConfig& config, int world_size, bool device_memory_is_separate);

/// The configuration at another stage, without the groups and offloads that this stage does not have: for
/// tables over stages.
EngineConfig at_stage(EngineConfig config, int stage, int world_size);

/// Whether a stage has what these tiers are for, on `world_size` ranks.
bool can_offload(zero::Sharding sharding, int64_t world_size, zero::Tiers tiers);

}  // namespace tessera
