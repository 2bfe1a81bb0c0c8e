// Ways to train a configuration that `tessera memory --fit` chooses from, and the file that it writes of one.
#pragma once

#include <cstdint>
#include <filesystem>
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

/// "optimizer on disk, stage 2, policy block, micro-batch 2 x 4".
std::string in_words(const Setting& setting);

/// CONFIG's name with "_fit", beside it.
std::filesystem::path default_fit_output(const std::filesystem::path& config);
/// Throws ConfigError if the file cannot be written there, or is CONFIG itself.
void check_fit_output(const std::filesystem::path& config, const std::filesystem::path& output);

/// The configuration with `overrides` and the setting, as JSON without comments, keys by their present
/// names. Throws ConfigError.
void write_fit_config(const std::filesystem::path& config, const std::vector<std::string>& overrides,
                      const Setting& setting, const std::string& disk_folder,
                      const std::filesystem::path& output);

}  // namespace tessera::tools
