// Ways to train a configuration that `tessera memory --fit` chooses from, and the file that it writes of one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "train/memory/state_formulas.h"

namespace tessera::tools {

/// How much memory state on disk passes through, on CPU ranks: the configuration's buffers; one buffer; or
/// one, for units of kSmallUnitNumel.
enum class DiskBuffers { kAsConfigured, kOne, kOneOfSmallUnits };
inline constexpr int64_t kSmallUnitNumel = 1'000'000;

/// One way. The same batch at every step, divided in another way.
struct Setting {
  int stage = 0;
  const train::TierSetting* tiers = &train::kTierSettings.front();  ///< where model state lies
  DiskBuffers buffers = DiskBuffers::kAsConfigured;
  std::string policy = "none";  ///< activation_checkpointing.policy
  int64_t micro_batch = 1;
  int64_t accumulation = 1;
  int world = 1;
  bool operator==(const Setting&) const = default;
};

/// Where model state lies, as TierSetting::name says it, without whose ranks: "optimizer on disk, 1 buffer".
std::string place_of(const Setting& setting);

/// Overrides, as --set takes them, that make a configuration this setting. `disk_folder`: for what
/// lies on disk.
std::vector<std::string> overrides_of(const Setting& setting, const std::string& disk_folder);

/// "optimizer on disk, stage 2, recomputation block, micro-batch 2 x 4".
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
