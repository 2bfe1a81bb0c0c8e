// A short run: what `tessera train` does, in a few steps. `tessera memory --fit` measures its memory.
#pragma once

#include <filesystem>
#include <vector>

#include "comm/init/init.h"
#include "core/log.h"
#include "train/task/registry.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

struct ShortRunOptions {
  int num_steps = 8;
  std::filesystem::path folder;  ///< of the run: its checkpoint and its files
  bool saves = true;             ///< false: it neither saves nor exports, even if `run` does
};

/// Collective. Trains `run` for a few steps, evaluates some batches of each set, and saves, exports and loads
/// as `run` says. Monitors are off, and nothing is printed. Returns the largest memory that the process has
/// had before each step, in bytes. Throws what run() throws.
std::vector<double> run_briefly(RunConfig run, const Registry& registry, const comm::Environment& environment,
                                const ShortRunOptions& options, const Logger& logger);

}  // namespace tessera::train
