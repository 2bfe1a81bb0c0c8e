#include "engine/config/sharding_plan.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {
namespace {

/// Returns the tier that the key's value names: on CPU ranks the host's memory is the device's.
zero::Tier tier_of(const OffloadConfig& offload, bool device_memory_is_separate) {
  if (offload.on_disk()) return zero::Tier::kDisk;
  return offload.device == "cpu" && device_memory_is_separate ? zero::Tier::kHost : zero::Tier::kDevice;
}

void check_tiers(const ZeroConfig& zero, const ShardingPlan& plan, int world_size) {
  const zero::Tiers& tiers = plan.tiers;
  const auto refuse = [](const char* key, const std::string& found, const char* reason) {
    throw ConfigError("zero_optimization.", key, ".device: found \"", found, "\" ", reason);
  };
  if (tiers.optimizer != zero::Tier::kDevice && !plan.sharding.optimizer && world_size > 1)
    refuse("offload_optimizer", zero.offload_optimizer.device,
           "at stage 0 with several ranks, each of which keeps all states; expected stage 1, 2 or 3");
  const zero::GroupSizes& groups = plan.groups;
  if (tiers.optimizer != zero::Tier::kDevice && groups.shard > 0)
    refuse("offload_optimizer", zero.offload_optimizer.device,
           "beside mics_shard_size; expected one of the two: gradients are summed over the groups on the "
           "device");
  if (tiers.parameters == zero::Tier::kDevice) return;
  if (groups.secondary > 0)
    refuse("offload_param", zero.offload_param.device,
           "beside zero_hpz_partition_size; expected one of the two: the second copy would be on the device");
  if (!plan.sharding.parameters)
    refuse("offload_param", zero.offload_param.device,
           "at a stage that does not shard parameters; expected stage 3");
  if (tiers.device_memory_is_separate && tiers.optimizer == zero::Tier::kDevice)
    refuse("offload_param", zero.offload_param.device,
           "on a GPU whose optimizer states are not offloaded; expected offload_optimizer with device "
           "\"cpu\" or "
           "\"nvme\" beside it: values on the host are updated there");
}

}  // namespace

ShardingPlan plan_sharding(const EngineConfig& config, int world_size, bool device_memory_is_separate) {
  const ZeroConfig& zero = config.zero;
  ShardingPlan plan;
  plan.sharding = zero::sharding_of(zero.stage);
  if (world_size > 1)
    plan.groups = {.shard = std::max(0, zero.mics_shard_size),
                   .secondary = zero.hpz_partition_size > 1 ? zero.hpz_partition_size : 0};
  plan.tiers = {.parameters = tier_of(zero.offload_param, device_memory_is_separate),
                .optimizer = tier_of(zero.offload_optimizer, device_memory_is_separate),
                .device_memory_is_separate = device_memory_is_separate};
  check_tiers(zero, plan, world_size);
  plan.unit_numel = std::min({zero.unit_numel, zero.reduce_bucket_size, zero.allgather_bucket_size});
  if (plan.tiers.optimizer != zero::Tier::kDevice) {
    if (zero.sub_group_size > 0) plan.unit_numel = std::min(plan.unit_numel, zero.sub_group_size);
    plan.sharding.optimizer = true;  // of one rank: its shard is all there is
  }
  plan.compute = config.compute_dtype();
  plan.accumulate = config.grad_accum_dtype.value_or(DType::kFloat32);
  plan.communicate = config.communication_dtype.value_or(plan.accumulate);
  return plan;
}

bool can_offload(zero::Sharding sharding, int64_t world_size, zero::Tiers tiers) {
  return (tiers.parameters == zero::Tier::kDevice || sharding.parameters) &&
         (tiers.optimizer == zero::Tier::kDevice || sharding.optimizer || world_size == 1);
}

EngineConfig at_stage(EngineConfig config, int stage, int world_size) {
  const zero::Sharding sharding = zero::sharding_of(stage);
  const ZeroConfig none;
  config.zero.stage = stage;
  if (!sharding.parameters) {
    config.zero.offload_param = none.offload_param;
    config.zero.mics_shard_size = none.mics_shard_size;
    config.zero.hpz_partition_size = none.hpz_partition_size;
  }
  if (!sharding.optimizer && world_size > 1) config.zero.offload_optimizer = none.offload_optimizer;
  return config;
}

}  // namespace tessera
