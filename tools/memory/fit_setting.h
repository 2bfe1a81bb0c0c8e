// Ways to train a configuration that `tessera memory --fit` chooses from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zero/plan/placement.h"

namespace tessera::tools {

/// What lies on disk, and in how many and how large buffers it is used. The order is that of their cost.
enum class OnDisk {
  kNothing,
  kOptimizer,
  kOptimizerFewBuffers,
  kAll,
  kAllFewBuffers,
  kAllSmallUnits,
};
inline constexpr OnDisk kAllOnDiskChoices[] = {
    OnDisk::kNothing, OnDisk::kOptimizer,     OnDisk::kOptimizerFewBuffers,
    OnDisk::kAll,     OnDisk::kAllFewBuffers, OnDisk::kAllSmallUnits};

/// zero_optimization.unit_numel of kAllSmallUnits.
inline constexpr int64_t kSmallUnitNumel = 1'000'000;

/// In a word or two, such as "optimizer, 1 buffer".
const char* name_of(OnDisk on_disk);
zero::Tiers tiers_of(OnDisk on_disk);

/// One way. The same batch at every step, divided in another way.
struct Setting {
  int stage = 0;
  OnDisk on_disk = OnDisk::kNothing;
  std::string policy = "none";  ///< activation_checkpointing.policy
  int64_t micro_batch = 1;
  int64_t accumulation = 1;
  int world = 1;
  auto operator<=>(const Setting&) const = default;
};

/// Overrides, as --set takes them, that make a configuration this setting. `disk_folder`: for what
/// lies on disk.
std::vector<std::string> overrides_of(const Setting& setting, const std::string& disk_folder);

}  // namespace tessera::tools
