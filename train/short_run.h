// A short run: what `tessera train` does, in a few steps. `tessera memory --fit` measures its memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "comm/init/init.h"
#include "core/log.h"
#include "train/task/registry.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

struct ShortRunOptions {
  int num_steps = 6;
  std::filesystem::path folder;  ///< of the run: its checkpoint and its files
  bool saves = true;             ///< false: it neither saves nor exports, even if `run` does
};

/// What a rank has measured. Bytes are of its process; on CUDA of its device, as the caching allocator has
/// reserved them.
struct ShortRun {
  int64_t idle = 0;                       ///< before the model was made
  int64_t peak = 0;                       ///< the most that it had
  std::vector<int64_t> before_step = {};  ///< the most that it had before each step
  double step_s = 0;                      ///< the fastest step's
};

/// Collective. Trains `run` for a few steps, evaluates some batches of each set, and saves, exports and loads
/// as `run` says. Monitors are off, and nothing is printed. Throws what run() throws.
ShortRun run_briefly(RunConfig run, const Registry& registry, const comm::Environment& environment,
                     const ShortRunOptions& options, const Logger& logger);

}  // namespace tessera::train
