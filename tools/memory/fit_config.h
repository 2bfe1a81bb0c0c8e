// The configuration that `tessera memory --fit` writes.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/memory/fit_setting.h"

namespace tessera::tools {

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
