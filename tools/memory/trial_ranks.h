// Ranks that measure one setting for `tessera memory`: how the command starts them, and the files in which
// they send back what they measured.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/log.h"
#include "tools/launch/launch_flags.h"
#include "train/memory_page.h"

namespace tessera::tools {

struct TrialSetting {
  int stage = 0;
  std::vector<std::string> overrides;  ///< as --set gives them
  std::string label;
};

/// How the command was started.
struct TrialStart {
  LaunchFlags launch;
  std::vector<std::string> args;  ///< of the command, which the ranks get too
  std::vector<int> ranks;         ///< those that measure: all, or the one that is simulated
  bool timelines = false;         ///< the largest rank's timeline is wanted
};

struct TrialResult {
  int exit_code = 0;  ///< of the ranks; what follows is there if it is 0
  std::vector<train::MemoryTrial> ranks;
  train::MeasuredRun largest;  ///< the rank with the largest peak
};

/// On a terminal: shows which trial runs, in the place of the line before it. Empty: none does.
void show_progress(const std::string& line);

/// Throws what run_ranks_of_self() throws.
TrialResult run_trial_ranks(const TrialStart& start, const TrialSetting& setting, const Logger& log);

/// A rank's part: writes what it measured into `folder`.
void write_trial(const std::filesystem::path& folder, const train::MemoryTrial& trial, bool timeline);

/// The configuration with one thing changed each: other recomputation, another micro-batch, optimizer states
/// on disk in `disk_folder`. `own`: what was measured as it is, of `config`.
std::vector<TrialSetting> variants_of(const train::MemoryTrial& own, const EngineConfig& config,
                                      const std::string& disk_folder);

}  // namespace tessera::tools
