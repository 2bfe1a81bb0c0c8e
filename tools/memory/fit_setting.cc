#include "tools/memory/fit_setting.h"

#include <nlohmann/json.hpp>

#include "core/str.h"

namespace tessera::tools {

using zero::Tier;

const char* name_of(OnDisk on_disk) {
  switch (on_disk) {
    case OnDisk::kNothing: return "nothing";
    case OnDisk::kOptimizer: return "optimizer";
    case OnDisk::kOptimizerFewBuffers: return "optimizer, 1 buffer";
    case OnDisk::kAll: return "all";
    case OnDisk::kAllFewBuffers: return "all, 1 buffer";
    case OnDisk::kAllSmallUnits: return "all, small units";
  }
  return "";
}

zero::Tiers tiers_of(OnDisk on_disk) {
  return {.parameters = on_disk >= OnDisk::kAll ? Tier::kDisk : Tier::kDevice,
          .optimizer = on_disk >= OnDisk::kOptimizer ? Tier::kDisk : Tier::kDevice};
}

std::vector<std::string> overrides_of(const Setting& setting, const std::string& disk_folder) {
  const zero::Tiers tiers = tiers_of(setting.on_disk);
  const std::string folder = nlohmann::json(disk_folder).dump();
  const bool few_buffers = setting.on_disk != OnDisk::kOptimizer && setting.on_disk != OnDisk::kAll;
  const auto section = [&](Tier tier) {
    if (tier == Tier::kDevice) return std::string(R"({"device": "none"})");
    return str(R"({"device": "nvme", "nvme_path": )", folder, few_buffers ? R"(, "buffer_count": 1})" : "}");
  };
  std::vector<std::string> overrides = {
      str("zero_optimization.stage=", setting.stage),
      str("zero_optimization.offload_optimizer=", section(tiers.optimizer)),
      str("zero_optimization.offload_param=", section(tiers.parameters)),
      str("train_micro_batch_size_per_gpu=", setting.micro_batch),
      str("gradient_accumulation_steps=", setting.accumulation),
      str("train_batch_size=", setting.micro_batch * setting.accumulation * setting.world)};
  if (setting.policy != "budget")  // which has further keys, and is only chosen where the file has it
    overrides.push_back(str("activation_checkpointing.policy=", setting.policy));
  if (setting.on_disk == OnDisk::kAllSmallUnits)
    overrides.push_back(str("zero_optimization.unit_numel=", kSmallUnitNumel));
  return overrides;
}

}  // namespace tessera::tools
