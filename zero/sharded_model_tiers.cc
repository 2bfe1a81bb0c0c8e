// The part of ShardedModel that connects it to the tiers below its device.
#include <algorithm>

#include "comm/init/agreement.h"
#include "core/check.h"
#include "core/error.h"
#include "core/memory/memory_use.h"
#include "zero/sharded_model.h"

namespace tessera::zero {

/// See [Note: state on the host] in param_unit.h.
void ShardedModel::connect_to_host() {
  const bool connected = options_.tiers.any_below_device() && options_.transfer != nullptr;
  host_apart_ = connected || options_.tiers.device_memory_is_separate;
  options_.tiers.device_memory_is_separate = connected;
  if (!options_.tiers.device_memory_is_separate) {
    options_.transfer = nullptr;
    TESSERA_CHECK(options_.device.is_cpu() || !options_.tiers.any_below_device());
    return;
  }
  // Else the update's result would have to travel down.
  TESSERA_CHECK(options_.tiers.optimizer != Tier::kDevice, "parameters below the device, the optimizer not");
  host_thread_ = std::make_unique<HostThread>(options_.device);
  options_.reducer.transfer = options_.optimizer.transfer = options_.transfer.get();
  options_.reducer.host = options_.optimizer.host = host_thread_.get();
  options_.offload.transfer = options_.transfer;
}

/// What of a unit lies on disk, in bytes.
static void add_sizes_on_disk(const UnitSpec& unit, int64_t shard_numel, const ShardedModelOptions& options,
                              std::vector<int64_t>& sizes) {
  const Placement placement =
      place(options.sharding, unit.trainable, /*one_copy_a_host=*/false, options.tiers);
  const int64_t local_numel = placement.updates_shard ? shard_numel : unit.numel;
  const int64_t fp32_bytes = local_numel * size_bytes(DType::kFloat32);
  if (placement.values == Tier::kDisk) sizes.push_back(shard_numel * size_bytes(unit.dtype));
  if (placement.optimizer == Tier::kDisk) {
    if (unit.dtype != DType::kFloat32 || placement.copies_masters_to_device()) sizes.push_back(fp32_bytes);
    sizes.insert(sizes.end(), state_names_of(options.optimizer).size(), fp32_bytes);
  }
  if (placement.gradient == Tier::kDisk)
    sizes.push_back(shard_numel * static_cast<int64_t>(at::elementSize(options.reducer.accumulate_dtype)));
}

/// Collective: a rank whose disk is full ends all of them.
void ShardedModel::make_offload_store() {
  if (!options_.tiers.any_on_disk()) return;
  std::vector<int64_t> sizes;
  for (int unit = 0; unit < layout_->num_units(); ++unit)
    add_sizes_on_disk(layout_->units()[unit], mesh_.shard_of(layout_->units()[unit].numel).numel(), options_,
                      sizes);
  comm::on_all_ranks<Error>(*comm_, "state on disk", [&] {
    const MemoryFor buffers(MemoryUse::kDiskBuffers);
    if (!sizes.empty())
      offload_store_ =
          std::make_unique<OffloadStore>(options_.offload, sizes, str("model state of rank ", comm_->rank()));
  });
}

}  // namespace tessera::zero
